// Images in memory, as bytes, and the functions that load them.
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
  std::vector<float> mean, stddev;  // (channels); of the training images scaled to 0..1

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
// Draws synthetic data: a smooth pattern per class. An image is the pattern of its class, shifted, plus
// noise.
DataSplits make_synthetic(const VitConfig& shape, int64_t train_count, int64_t test_count, uint64_t seed);

// Returns the folder of fashion-mnist if the spec does not name a folder: $GRADWIRE_DATA or a subfolder of
// $GRADWIRE_DATA. If the variable is not set, returns the folder of Debian's package. Throws BadInput if
// $GRADWIRE_DATA does not have fashion-mnist.
std::string default_fashion_mnist_directory();

// Throws BadInput unless the model accepts these images and has an output for each class.
void check_model_fits(const VitConfig& model, const Dataset& data);

}  // namespace gradwire
