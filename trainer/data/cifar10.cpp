// CIFAR-10's binary version: records of one label byte and 3 x 32 x 32 pixel bytes, 10,000 per file.
#include <fmt/format.h>

#include <filesystem>

#include "runtime/util/error.h"
#include "trainer/data/dataset.h"
#include "trainer/data/dataset_file.h"
#include "trainer/data/file_kind.h"
#include "trainer/data/normalization.h"

namespace gradwire {
namespace {

constexpr size_t kPixels = 3 * 32 * 32, kRecord = 1 + kPixels;
constexpr int32_t kCifar10Classes = 10;
constexpr const char* kCifar10Remedy =
    "cifar10:DIR must have the binary version (cifar-10-binary.tar.gz): data_batch_1.bin to data_batch_5.bin "
    "and test_batch.bin";

// Appends the records of one file. Returns the number of records.
size_t append(Dataset& data, const std::string& path) {
  std::vector<uint8_t> bytes = read_file(path, kDatasetFileLimit, kCifar10Remedy);
  auto fail = [&](const std::string& why) {
    throw BadInput(fmt::format("{}: {}; {}", path, why, kCifar10Remedy));
  };
  if (const std::string kind = foreign_kind(bytes); !kind.empty() && bytes[0] >= kCifar10Classes) {
    throw BadInput(fmt::format("{}: not CIFAR-10's binary version but {}", path, kind));
  }
  if (bytes.empty() || bytes.size() % kRecord != 0) {
    fail(fmt::format("{} bytes are not a whole number of records of {} bytes: truncated, or not CIFAR-10",
                     bytes.size(), kRecord));
  }
  size_t records = bytes.size() / kRecord;
  data.images.reserve(data.images.size() + records * kPixels);
  for (size_t i = 0; i < records; ++i) {
    const uint8_t* record = bytes.data() + i * kRecord;
    if (record[0] >= kCifar10Classes) {
      fail(fmt::format("label of record {} is {}, but the classes are 0 to {}", i, record[0],
                       kCifar10Classes - 1));
    }
    data.labels.push_back(record[0]);
    data.images.insert(data.images.end(), record + 1, record + kRecord);
  }
  return records;
}

Dataset empty_cifar10() {
  Dataset data;
  data.name = "cifar10";
  data.channels = 3;
  data.height = data.width = 32;
  data.classes = kCifar10Classes;
  return data;
}

}  // namespace

DataSplits load_cifar10(const std::string& directory) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  fs::path root = directory;
  // The archive has a top-level folder. Accept this folder or its parent.
  if (!fs::exists(root / "data_batch_1.bin", ignored) &&
      fs::is_directory(root / "cifar-10-batches-bin", ignored)) {
    root /= "cifar-10-batches-bin";
  }
  DataSplits splits{empty_cifar10(), empty_cifar10()};
  size_t first = 0;
  for (int batch = 1; batch <= 5; ++batch) {
    std::string path = (root / fmt::format("data_batch_{}.bin", batch)).string();
    size_t records = append(splits.train, path);
    if (batch == 1) first = records;
    if (records != first) {
      throw BadInput(
          fmt::format("{}: {} records, but data_batch_1.bin has {}; truncated after a whole record? {}", path,
                      records, first, kCifar10Remedy));
    }
  }
  append(splits.test, (root / "test_batch.bin").string());
  set_statistics(splits);
  return splits;
}

}  // namespace gradwire
