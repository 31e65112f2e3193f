#include "trainer/data/dataset.h"

#include <algorithm>

#include "runtime/error.h"

namespace gradwire {
namespace {

// Synthetic data is made in memory: enough for an epoch to mean something, no more than this unless asked
// for.
constexpr int64_t kSyntheticBytes = 64 << 20;
constexpr int64_t kSyntheticMost = 8192, kSyntheticLeast = 256;

}  // namespace

DataSplits load_data(const DataSpec& spec, const VitConfig& model, uint64_t seed, int64_t min_train) {
  switch (spec.kind) {
    case DataSpec::Kind::fashion_mnist:
      return load_fashion_mnist(spec.directory.empty() ? default_fashion_mnist_directory() : spec.directory);
    case DataSpec::Kind::cifar10:
      return load_cifar10(spec.directory);
    case DataSpec::Kind::synthetic:
      break;
  }
  check_model(model);
  int64_t image_bytes = int64_t{model.channels} * model.image * model.image;
  int64_t train = spec.count;
  if (train == 0) {
    train = std::clamp(kSyntheticBytes / image_bytes, kSyntheticLeast, kSyntheticMost);
    train = std::max(train, min_train);
  }
  return make_synthetic(model, train, std::clamp<int64_t>(train / 8, 1, 2048), seed);
}

void check_model_fits(const VitConfig& model, const Dataset& data) {
  std::string takes = "model " + model.name + " takes " + std::to_string(model.channels) + "x" +
                      std::to_string(model.image) + "x" + std::to_string(model.image) + " images";
  if (data.height != data.width) {
    throw BadInput(data.name + ": images of " + std::to_string(data.height) + "x" +
                   std::to_string(data.width) + " are not square, and the model takes square ones only");
  }
  if (model.channels != data.channels || model.image != data.height) {
    throw BadInput(takes + ", but those of " + data.name + " are " + std::to_string(data.channels) + "x" +
                   std::to_string(data.height) + "x" + std::to_string(data.width) + "; use --image-size " +
                   std::to_string(data.height) + " with a --patch that divides it");
  }
  if (model.classes < data.classes) {
    throw BadInput("model " + model.name + " has " + std::to_string(model.classes) + " outputs, but " +
                   data.name + " has " + std::to_string(data.classes) + " classes");
  }
}

}  // namespace gradwire
