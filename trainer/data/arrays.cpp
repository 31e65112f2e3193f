// Data of the user as arrays: .npy files (numpy.save) or safetensors files.

#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <regex>
#include <string_view>

#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "trainer/data/dataset.h"
#include "trainer/data/safetensors.h"

namespace gradwire {
namespace {

constexpr const char* kArraysRemedy =
    "arrays:DIR must have train_images.npy, train_labels.npy, test_images.npy and test_labels.npy, or "
    "train.safetensors and test.safetensors with the tensors images and labels";
constexpr int64_t kMost = 1 << 24;  // of classes, channels and pixels of a side; a model has lower limits

struct Array {
  std::string name;  // the file and, in a safetensors file, the tensor
  std::string type;  // as numpy or safetensors names it
  std::vector<int64_t> shape = {};
  uint64_t bytes = 0;  // in the file
  std::function<void(std::span<std::byte> out)> read = {};

  // Bytes of a value; 0 for a type that is not supported. Numbers are little-endian.
  size_t width() const { return type == "|u1" || type == "U8" ? 1 : type == "<i8" || type == "I64" ? 8 : 0; }
  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> why, Args&&... args) const {
    throw BadInput("{}: {}", name, fmt::format(why, std::forward<Args>(args)...));
  }
};

// Parses a .npy file of version 1.0: a magic number, the header's length, and the header, a Python dictionary
// as numpy.save writes it. Structured types, which are not supported, have longer headers.
Array open_npy(const std::string& path) {
  constexpr uint64_t kMaxHeader = 1000, kBegin = 10;
  const auto file = std::make_shared<FileDescriptor>(open_regular_file(path));
  Array array{.name = path, .type = ""};
  struct stat status {};
  if (fstat(file->fd(), &status) != 0) array.refuse("{}", std::strerror(errno));
  const auto size = static_cast<uint64_t>(status.st_size);
  std::vector<uint8_t> head(std::min(size, kMaxHeader + kBegin));
  read_at(file->fd(), path, 0, std::as_writable_bytes(std::span(head)));
  constexpr std::string_view kMagic = "\x93NUMPY";
  const std::string_view text(reinterpret_cast<const char*>(head.data()), head.size());
  if (!text.starts_with(kMagic) || size < kBegin) {
    const std::string kind = foreign_kind(head);
    array.refuse("not a .npy file{}{}", kind.empty() ? "" : " but ", kind);
  }
  const uint64_t length = head[8] | uint64_t{head[9]} << 8;
  if (head[6] != 1 || length > kMaxHeader) {
    array.refuse(
        "version {}.{} with a header of {} bytes; expected 1.0, as numpy.save writes arrays of numbers",
        head[6], head[7], length);
  }
  if (kBegin + length > size) array.refuse("truncated: {} bytes, shorter than its header", size);
  const std::string header(text.substr(kBegin, length));
  static const std::regex kHeader(
      R"(\{\s*'descr':\s*'([^']*)',\s*'fortran_order':\s*(True|False),\s*'shape':\s*\()"
      R"(((?:\d{1,15},\s*)*(?:\d{1,15})?)\),?\s*\}\s*)"),
      kExtent("[0-9]+");
  std::smatch found;
  if (!std::regex_match(header, found, kHeader))
    array.refuse("its header is not that of an array of numbers, as numpy.save writes it");
  if (found.str(2) == "True") array.refuse("in Fortran order; save numpy.ascontiguousarray() of the array");
  array.type = found.str(1);
  const std::string shape = found.str(3);
  for (std::sregex_iterator at(shape.begin(), shape.end(), kExtent), end; at != end; ++at)
    array.shape.push_back(std::stoll(at->str()));
  array.bytes = size - kBegin - length;
  array.read = [=](std::span<std::byte> out) { read_at(file->fd(), path, kBegin + length, out); };
  return array;
}

// Opens the images or labels of a split.
Array open_array(const std::string& folder, const std::string& split, const std::string& what) {
  namespace fs = std::filesystem;
  const std::string npy = (fs::path(folder) / fmt::format("{}_{}.npy", split, what)).string(),
                    tensors = (fs::path(folder) / (split + ".safetensors")).string();
  std::error_code none;
  if (!fs::exists(tensors, none)) {
    if (!fs::exists(npy, none)) throw BadInput("{}: no such file; {}", npy, kArraysRemedy);
    return open_npy(npy);
  }
  if (fs::exists(npy, none)) throw BadInput("{}: {} exists also; remove one of them", npy, tensors);
  const auto file = std::make_shared<SafetensorsReader>(tensors);
  const SafetensorsReader::Tensor* tensor = file->find(what);
  if (tensor == nullptr) throw BadInput("{}: no tensor is named '{}'; {}", tensors, what, kArraysRemedy);
  return {.name = fmt::format("{}, '{}'", tensors, what),
          .type = tensor->dtype,
          .shape = tensor->shape,
          .bytes = tensor->bytes,
          .read = [=](std::span<std::byte> out) { file->read_bytes(*tensor, 0, out); }};
}

// Throws BadInput unless the array has as many bytes as its shape needs, at least one.
void check_array(const Array& array, size_t most_width, const char* expected) {
  if (array.width() == 0 || array.width() > most_width)
    array.refuse("its values have type {}; expected {}", array.type, expected);
  const std::string shape = fmt::format("{}", fmt::join(array.shape, " x "));
  uint64_t bytes = array.width();
  for (const int64_t extent : array.shape) {
    if (extent < 1) array.refuse("an array of shape {} has no values", shape);
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(extent), &bytes)) bytes = UINT64_MAX;
  }
  if (bytes == array.bytes) return;
  array.refuse("{}: {} bytes of values, but shape {} needs {}",
               array.bytes < bytes ? "truncated" : "too long", array.bytes, shape, bytes);
}

void read_images(const Array& array, Dataset& data) {
  check_array(array, 1, "uint8, 0 to 255: (images * 255).astype('uint8') of images from 0 to 1");
  std::vector<int64_t> shape = array.shape;
  if (shape.size() == 3) shape.insert(shape.begin() + 1, 1);  // one channel
  const bool last = shape.size() == 4 && shape[3] <= 4 && shape[1] > 4;
  if (shape.size() != 4 || last || std::ranges::max(std::span(shape).subspan(1)) > kMost) {
    array.refuse("images of shape {}{}; expected N x C x H x W or N x H x W{}", fmt::join(array.shape, " x "),
                 last ? " have the channels last" : "", last ? ": transpose(0, 3, 1, 2)" : "");
  }
  data.channels = static_cast<int32_t>(shape[1]);
  data.height = static_cast<int32_t>(shape[2]), data.width = static_cast<int32_t>(shape[3]);
  data.images.resize(static_cast<size_t>(shape[0] * data.image_elements()));
  array.read(std::as_writable_bytes(std::span(data.images)));
}

// Reads labels, each less than `classes`.
void read_labels(const Array& array, int64_t images, int64_t classes, Dataset& data) {
  check_array(array, sizeof(int64_t), "uint8 or int64: labels.astype('int64')");
  if (array.shape != std::vector{images}) {
    array.refuse("labels of shape {}; expected one for each of the {} images", fmt::join(array.shape, " x "),
                 images);
  }
  std::vector<std::byte> values(array.bytes);
  array.read(values);
  for (size_t i = 0; i * array.width() < values.size(); ++i) {
    int64_t label = 0;
    std::memcpy(&label, &values[i * array.width()], array.width());
    if (label < 0 || label >= classes)
      array.refuse("label {} is {}, but the classes are 0 to {}", i, label, classes - 1);
    data.labels.push_back(static_cast<int32_t>(label));
  }
}

}  // namespace

DataSplits load_arrays(const std::string& directory) {
  DataSplits splits;
  int64_t classes = kMost;
  for (Dataset* data : {&splits.train, &splits.test}) {
    const std::string split = data == &splits.train ? "train" : "test";
    data->name = "arrays";
    const Array images = open_array(directory, split, "images");
    read_images(images, *data);
    read_labels(open_array(directory, split, "labels"), images.shape[0], classes, *data);
    // The classes are those of the training images.
    if (data == &splits.train) classes = 1 + *std::ranges::max_element(data->labels);
    data->classes = static_cast<int32_t>(classes);
  }
  const Dataset &train = splits.train, &test = splits.test;
  if (train.channels != test.channels || train.height != test.height || train.width != test.width) {
    throw BadInput("{}: training images are {}x{}x{}, test images {}x{}x{}", directory, train.channels,
                   train.height, train.width, test.channels, test.height, test.width);
  }
  set_statistics(splits);
  return splits;
}

}  // namespace gradwire
