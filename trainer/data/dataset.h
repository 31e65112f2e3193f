// Images in memory, as bytes, and where they come from.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "trainer/config/config.h"

namespace gradwire {

struct Dataset {
  std::string name;
  int32_t channels = 0, height = 0, width = 0, classes = 0;
  std::vector<uint8_t> images;      // (count, channels, height, width)
  std::vector<int32_t> labels;      // (count), each in 0..classes-1
  std::vector<float> mean, stddev;  // (channels), of the training images scaled to 0..1

  int64_t count() const { return static_cast<int64_t>(labels.size()); }
  int64_t image_elements() const { return int64_t{1} * channels * height * width; }
};

struct DataSplits {
  Dataset train, test;  // same shape, classes, mean and stddev
};

// Loads what `spec` names; synthetic data takes its shape from `model` and at least `min_train` training
// images unless the spec says how many. Throws BadInput that names the file and the remedy: missing or
// truncated files, wrong magic, wrong counts, labels out of range.
DataSplits load_data(const DataSpec& spec, const VitConfig& model, uint64_t seed, int64_t min_train = 0);

// The four IDX files of Fashion-MNIST (or MNIST), each plain or gzip (.gz).
DataSplits load_fashion_mnist(const std::string& directory);
// data_batch_1..5.bin and test_batch.bin of the binary version.
DataSplits load_cifar10(const std::string& directory);
// Each class has a smooth pattern of its own, an image is its class's pattern, shifted, plus noise:
// learnable, not trivial.
DataSplits make_synthetic(const VitConfig& shape, int64_t train_count, int64_t test_count, uint64_t seed);

// Where fashion-mnist lies when its spec names no folder: $GRADWIRE_DATA/fashion-mnist, $GRADWIRE_DATA,
// Debian's folder.
std::string default_fashion_mnist_directory();

// Throws BadInput unless the model takes these images and has an output for each class.
void check_model_fits(const VitConfig& model, const Dataset& data);

}  // namespace gradwire
