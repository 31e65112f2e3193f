#include "trainer/data/dataset.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/util/error.h"

namespace gradwire {
namespace {

// The default size of synthetic data.
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
  std::string takes =
      fmt::format("model {} takes {}x{}x{} images", model.name, model.channels, model.image, model.image);
  if (data.height != data.width) {
    throw BadInput(fmt::format("{}: images of {}x{} are not square; the model takes only square images",
                               data.name, data.height, data.width));
  }
  if (model.channels != data.channels || model.image != data.height) {
    throw BadInput(fmt::format("{}, but {} has {}x{}x{}; use --image-size {} and a --patch that divides it",
                               takes, data.name, data.channels, data.height, data.width, data.height));
  }
  if (model.classes < data.classes) {
    throw BadInput(fmt::format("model {} has {} outputs, but {} has {} classes", model.name, model.classes,
                               data.name, data.classes));
  }
}

}  // namespace gradwire
