// Images in memory, as bytes, and the functions that load them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "trainer/config/config.h"

namespace gradwire {

struct Dataset {
  std::string name;
  int32_t channels = 0, height = 0, width = 0, classes = 0;
  std::vector<uint8_t> images = {};           // (count, channels, height, width)
  std::vector<int32_t> labels = {};           // (count), each in 0..classes-1
  std::vector<float> mean = {}, stddev = {};  // (channels); of the training images scaled to 0..1

  int64_t count() const { return static_cast<int64_t>(labels.size()); }
  int64_t image_elements() const { return int64_t{1} * channels * height * width; }
};

struct DataSplits {
  Dataset train = {}, test = {};  // both splits have the same shape, classes, mean and stddev
  std::vector<std::string> notes = {};
};

// Loads the data that `spec` names. Synthetic data has the model's image shape and at least `min_train`
// training images, unless the spec sets their count. Throws BadInput, which names the file and the remedy,
// for missing or truncated files, wrong magic numbers or counts, and labels out of range.
DataSplits load_data(const DataSpec& spec, const VitConfig& model, uint64_t seed, int64_t min_train = 0);

// Loads the four IDX files of Fashion-MNIST (or MNIST), each plain or gzip (.gz), from `directory` or from
// torchvision's folder in it. If several files match a name, uses the first that can be read.
DataSplits load_fashion_mnist(const std::string& directory);
// Loads data_batch_1..5.bin and test_batch.bin of CIFAR-10's binary version.
DataSplits load_cifar10(const std::string& directory);
// Loads train and test images and labels, each a .npy file or a tensor of a safetensors file.
DataSplits load_arrays(const std::string& directory);
// Draws synthetic data: a smooth pattern per class. An image is the pattern of its class, shifted, plus
// noise.
DataSplits make_synthetic(const VitConfig& shape, int64_t train_count, int64_t test_count, uint64_t seed);

// Returns the folder of fashion-mnist if the spec does not name a folder: $GRADWIRE_DATA or a subfolder of
// $GRADWIRE_DATA. If the variable is not set, returns the folder of Debian's package. Throws BadInput if
// $GRADWIRE_DATA does not have fashion-mnist.
std::string default_fashion_mnist_directory();

// Throws BadInput unless the model accepts these images and has an output for each class.
void check_model_fits(const VitConfig& model, const Dataset& data);

// Reads whole files, plain or gzip, into memory.

// The maximum size of a dataset file, in bytes.
inline constexpr size_t kDatasetFileLimit = size_t{1} << 30;

// Returns the contents of `path`, decompressed if the file is gzip. Throws BadInput, which names the file and
// ends with `remedy`, when the file is missing, unreadable, truncated, corrupt, or longer than `limit_bytes`.
std::vector<uint8_t> read_file(const std::string& path, size_t limit_bytes, const std::string& remedy);

// Detects files left by a failed or unfinished download.

// Number of bytes that foreign_kind() reads.
inline constexpr size_t kFileKindBytes = 512;

// Returns the kind of a file from its first bytes, with a remedy: "a zip archive; unpack it". Detects HTML
// pages, archives, compressed files and Git LFS pointers. Returns "" for any other file.
std::string foreign_kind(std::span<const uint8_t> head);

// Mean and standard deviation per channel, for normalization.

// Sets mean and stddev of both splits to the statistics of the training images, scaled to 0..1. Computes them
// from a histogram of byte values, so only the final operations round. A constant channel gets stddev 1.
void set_statistics(DataSplits& splits);

}  // namespace gradwire
