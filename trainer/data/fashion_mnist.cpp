// Fashion-MNIST (and MNIST) from its four IDX files: big-endian magic 0x0000'08'DIMS (unsigned bytes, DIMS
// dimensions), the dimensions as 32-bit numbers, then the bytes.
#include <fmt/format.h>

#include <filesystem>

#include "runtime/environment.h"
#include "runtime/error.h"
#include "trainer/data/dataset.h"
#include "trainer/data/file.h"
#include "trainer/data/statistics.h"

namespace gradwire {
namespace {

constexpr const char* kDebianDirectory = "/usr/share/datasets/fashion-mnist";
constexpr const char* kFashionMnistRemedy =
    "install Debian's dataset-fashion-mnist (make setup does), or name a folder with the four IDX files: "
    "--data fashion-mnist:DIR";
constexpr int32_t kFashionMnistClasses = 10;

struct Idx {
  std::vector<int64_t> shape;
  std::vector<uint8_t> values;
};

// `stem`.gz or `stem`, whichever exists.
std::string find_idx(const std::string& directory, const std::string& stem) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  fs::path plain = fs::path(directory) / stem, gzip = fs::path(directory) / (stem + ".gz");
  return (!fs::exists(gzip, ignored) && fs::exists(plain, ignored) ? plain : gzip).string();
}

Idx read_idx(const std::string& path, uint32_t dimensions) {
  std::vector<uint8_t> bytes = read_file(path, kDatasetFileLimit, kFashionMnistRemedy);
  auto fail = [&](const std::string& why) {
    throw BadInput(fmt::format("{}: {}; {}", path, why, kFashionMnistRemedy));
  };
  auto word = [&](size_t index) {
    const uint8_t* at = bytes.data() + 4 * index;
    return uint32_t{at[0]} << 24 | uint32_t{at[1]} << 16 | uint32_t{at[2]} << 8 | at[3];
  };
  size_t header = 4 * (1 + size_t{dimensions});
  if (bytes.size() < header) fail(fmt::format("only {} bytes, shorter than an IDX header", bytes.size()));
  uint32_t magic = 0x00000800u | dimensions;
  if (word(0) != magic)
    fail(fmt::format("wrong magic number 0x{:08x}, an IDX file of this kind has 0x{:08x}", word(0), magic));

  Idx idx;
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

Dataset read_split(const std::string& directory, const std::string& prefix) {
  std::string image_path = find_idx(directory, prefix + "-images-idx3-ubyte");
  std::string label_path = find_idx(directory, prefix + "-labels-idx1-ubyte");
  Idx images = read_idx(image_path, 3), labels = read_idx(label_path, 1);
  if (images.shape[0] != labels.shape[0]) {
    throw BadInput(fmt::format("{}: {} labels for the {} images of {}; {}", label_path, labels.shape[0],
                               images.shape[0], image_path, kFashionMnistRemedy));
  }
  Dataset data;
  data.name = "fashion-mnist";
  data.channels = 1;
  data.height = static_cast<int32_t>(images.shape[1]);
  data.width = static_cast<int32_t>(images.shape[2]);
  data.classes = kFashionMnistClasses;
  data.images = std::move(images.values);
  data.labels.assign(labels.values.begin(), labels.values.end());
  for (size_t i = 0; i < data.labels.size(); ++i) {
    if (data.labels[i] >= kFashionMnistClasses) {
      throw BadInput(fmt::format("{}: label {} is {}, but the classes are 0 to {}; {}", label_path, i,
                                 data.labels[i], kFashionMnistClasses - 1, kFashionMnistRemedy));
    }
  }
  return data;
}

}  // namespace

std::string default_fashion_mnist_directory() {
  namespace fs = std::filesystem;
  if (const char* root = environment("GRADWIRE_DATA")) {
    for (const fs::path& candidate : {fs::path(root) / "fashion-mnist", fs::path(root)}) {
      std::error_code ignored;
      if (fs::exists(find_idx(candidate.string(), "train-images-idx3-ubyte"), ignored))
        return candidate.string();
    }
  }
  return kDebianDirectory;
}

DataSplits load_fashion_mnist(const std::string& directory) {
  DataSplits splits{read_split(directory, "train"), read_split(directory, "t10k")};
  if (splits.train.height != splits.test.height || splits.train.width != splits.test.width) {
    throw BadInput(fmt::format("{}: training images are {}x{}, test images {}x{}; {}", directory,
                               splits.train.height, splits.train.width, splits.test.height, splits.test.width,
                               kFashionMnistRemedy));
  }
  set_statistics(splits);
  return splits;
}

}  // namespace gradwire
