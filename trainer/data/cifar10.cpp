// CIFAR-10's binary version: records of one label byte and 3 x 32 x 32 pixel bytes, 10,000 per file.

#include <filesystem>

#include "runtime/util/environment.h"
#include "runtime/util/error.h"
#include "trainer/data/dataset.h"

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
  auto fail = [&](const std::string& why) { throw BadInput("{}: {}; {}", path, why, kCifar10Remedy); };
  if (const std::string kind = foreign_kind(bytes); !kind.empty() && bytes[0] >= kCifar10Classes) {
    throw BadInput("{}: not CIFAR-10's binary version but {}", path, kind);
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
  const Dataset empty{
      .name = "cifar10", .channels = 3, .height = 32, .width = 32, .classes = kCifar10Classes};
  DataSplits splits{empty, empty};
  size_t first = 0;
  for (int batch = 1; batch <= 5; ++batch) {
    std::string path = (root / fmt::format("data_batch_{}.bin", batch)).string();
    size_t records = append(splits.train, path);
    if (batch == 1) first = records;
    if (records != first) {
      throw BadInput("{}: {} records, but data_batch_1.bin has {}; truncated after a whole record? {}", path,
                     records, first, kCifar10Remedy);
    }
  }
  append(splits.test, (root / "test_batch.bin").string());
  set_statistics(splits);
  return splits;
}

// Fashion-MNIST (and MNIST) from its four IDX files: big-endian magic 0x0000'08'DIMS (unsigned bytes, DIMS
// dimensions), the dimensions as 32-bit numbers, then the bytes.

namespace {

constexpr const char* kDebianDirectory = "/usr/share/datasets/fashion-mnist";
constexpr const char* kFashionMnistRemedy =
    "install Debian's dataset-fashion-mnist (make setup does), or name a folder with the four IDX files: "
    "--data fashion-mnist:DIR";
constexpr int32_t kFashionMnistClasses = 10;
const std::string kImages = "images-idx3-ubyte", kLabels = "labels-idx1-ubyte";

struct Idx {
  std::string path;
  std::vector<int64_t> shape;
  std::vector<uint8_t> values;
};

// Returns the files that may hold "images-idx3-ubyte" of "train", gzip first: Debian's and torchvision's
// name, and the name with a dot that many archives of MNIST have. Returns the existing files, or else the
// first name.
std::vector<std::string> idx_files(const std::string& directory, const std::string& prefix,
                                   const std::string& what) {
  namespace fs = std::filesystem;
  std::string dotted = what;
  dotted.replace(dotted.find('-'), 1, ".");
  std::vector<std::string> found;
  for (const std::string& name : {what, dotted}) {
    for (const char* suffix : {".gz", ""}) {
      const fs::path path = fs::path(directory) / (prefix + "-" + name + suffix);
      if (std::error_code ignored; fs::exists(path, ignored)) found.push_back(path.string());
    }
  }
  if (found.empty()) found.push_back((fs::path(directory) / (prefix + "-" + what + ".gz")).string());
  return found;
}

bool holds_fashion_mnist(const std::string& directory) {
  std::error_code ignored;
  return std::filesystem::exists(idx_files(directory, "train", kImages)[0], ignored);
}

// Returns `directory` or the subfolder with the files: Gradwire's or torchvision's subfolder.
std::string folder_in(const std::string& directory) {
  namespace fs = std::filesystem;
  for (const char* below : {"", "fashion-mnist", "raw", "FashionMNIST/raw", "MNIST/raw"}) {
    const std::string candidate = *below == 0 ? directory : (fs::path(directory) / below).string();
    if (holds_fashion_mnist(candidate)) return candidate;
  }
  return directory;
}

Idx read_idx(const std::string& path, uint32_t dimensions) {
  std::vector<uint8_t> bytes = read_file(path, kDatasetFileLimit, kFashionMnistRemedy);
  auto fail = [&](const std::string& why) { throw BadInput("{}: {}; {}", path, why, kFashionMnistRemedy); };
  auto word = [&](size_t index) {
    const uint8_t* at = bytes.data() + 4 * index;
    return uint32_t{at[0]} << 24 | uint32_t{at[1]} << 16 | uint32_t{at[2]} << 8 | at[3];
  };
  if (const std::string kind = foreign_kind(bytes); !kind.empty()) {
    throw BadInput("{}: not an IDX file but {}", path, kind);
  }
  size_t header = 4 * (1 + size_t{dimensions});
  if (bytes.size() < header) fail(fmt::format("only {} bytes, shorter than an IDX header", bytes.size()));
  uint32_t magic = 0x00000800u | dimensions;
  if (word(0) != magic)
    fail(fmt::format("wrong magic number 0x{:08x}, an IDX file of this kind has 0x{:08x}", word(0), magic));

  Idx idx{.path = path, .shape = {}, .values = {}};
  size_t expected = 1;
  std::string shape;
  for (uint32_t d = 0; d < dimensions; ++d) {
    uint32_t extent = word(1 + d);
    shape += fmt::format("{}{}", d == 0 ? "" : "x", extent);
    if (extent == 0 || extent > kDatasetFileLimit / expected)
      fail(fmt::format("impossible shape {} in its header", shape));
    idx.shape.push_back(extent);
    expected *= extent;
  }
  if (bytes.size() - header != expected) {
    fail(
        fmt::format("{} bytes after the header, which says {} = {}", bytes.size() - header, shape, expected));
  }
  idx.values.assign(bytes.begin() + static_cast<std::ptrdiff_t>(header), bytes.end());
  return idx;
}

// Returns the first readable file. Adds a note for each unreadable file, unless all files are unreadable.
Idx read_first(const std::vector<std::string>& paths, uint32_t dimensions, std::vector<std::string>& notes) {
  std::vector<std::string> problems;
  for (const std::string& path : paths) {
    try {
      Idx found = read_idx(path, dimensions);
      for (const std::string& problem : problems) {
        notes.push_back(fmt::format("Note: reading {} instead of a broken file: {}", path, problem));
      }
      return found;
    } catch (const BadInput& error) {
      problems.emplace_back(error.what());
    }
  }
  throw BadInput(problems.at(0));
}

Dataset read_split(const std::string& directory, const std::string& prefix, std::vector<std::string>& notes) {
  Idx images = read_first(idx_files(directory, prefix, kImages), 3, notes);
  const Idx labels = read_first(idx_files(directory, prefix, kLabels), 1, notes);
  if (images.shape[0] != labels.shape[0]) {
    throw BadInput("{}: {} labels for the {} images of {}; {}", labels.path, labels.shape[0], images.shape[0],
                   images.path, kFashionMnistRemedy);
  }
  Dataset data{.name = "fashion-mnist",
               .channels = 1,
               .height = static_cast<int32_t>(images.shape[1]),
               .width = static_cast<int32_t>(images.shape[2]),
               .classes = kFashionMnistClasses,
               .images = std::move(images.values),
               .labels = {labels.values.begin(), labels.values.end()}};
  for (size_t i = 0; i < data.labels.size(); ++i) {
    if (data.labels[i] >= kFashionMnistClasses) {
      throw BadInput("{}: label {} is {}, but the classes are 0 to {}; {}", labels.path, i, data.labels[i],
                     kFashionMnistClasses - 1, kFashionMnistRemedy);
    }
  }
  return data;
}

}  // namespace

std::string default_fashion_mnist_directory() {
  const char* root = path_in_environment("GRADWIRE_DATA");
  if (root == nullptr) return kDebianDirectory;
  std::string found = folder_in(root);
  if (!holds_fashion_mnist(found)) {
    throw BadInput(
        "GRADWIRE_DATA is '{}', which does not contain train-{}.gz, nor do its folders fashion-mnist, raw, "
        "FashionMNIST/raw and MNIST/raw; name the folder with the four IDX files, or unset it to use {}",
        root, kImages, kDebianDirectory);
  }
  return found;
}

DataSplits load_fashion_mnist(const std::string& given) {
  const std::string directory = folder_in(given);
  DataSplits splits;
  splits.train = read_split(directory, "train", splits.notes);
  splits.test = read_split(directory, "t10k", splits.notes);
  if (splits.train.height != splits.test.height || splits.train.width != splits.test.width) {
    throw BadInput("{}: training images are {}x{}, test images {}x{}; {}", directory, splits.train.height,
                   splits.train.width, splits.test.height, splits.test.width, kFashionMnistRemedy);
  }
  set_statistics(splits);
  return splits;
}

}  // namespace gradwire
