#include "bench/cases/models.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/util/error.h"
#include "trainer/model/parameters.h"

namespace gradwire::bench {
namespace {

// Returns torchvision's ResNets (He et al., arXiv 1512.03385): basic blocks for 18, bottlenecks for 50.
std::vector<GradientTensor> resnet(bool bottleneck, const std::vector<int>& blocks) {
  std::vector<GradientTensor> all;
  auto conv = [&](const std::string& name, int64_t out, int64_t in, int64_t side) {
    all.push_back({name + ".weight", {out, in, side, side}});
  };
  auto norm = [&](const std::string& name, int64_t width) {
    all.push_back({name + ".weight", {width}});
    all.push_back({name + ".bias", {width}});
  };
  conv("conv1", 64, 3, 7);
  norm("bn1", 64);
  const int64_t expansion = bottleneck ? 4 : 1;
  int64_t in = 64, width = 64;
  for (size_t stage = 0; stage < blocks.size(); ++stage, width *= 2) {
    for (int b = 0; b < blocks[stage]; ++b) {
      const std::string at = fmt::format("layer{}.{}.", stage + 1, b);
      int64_t out = width * expansion;
      if (bottleneck) {
        conv(at + "conv1", width, in, 1);
        norm(at + "bn1", width);
        conv(at + "conv2", width, width, 3);
        norm(at + "bn2", width);
        conv(at + "conv3", out, width, 1);
        norm(at + "bn3", out);
      } else {
        conv(at + "conv1", width, in, 3);
        norm(at + "bn1", width);
        conv(at + "conv2", width, width, 3);
        norm(at + "bn2", width);
      }
      if (in != out || (stage > 0 && b == 0)) {
        conv(at + "downsample.0", out, in, 1);
        norm(at + "downsample.1", out);
      }
      in = out;
    }
  }
  all.push_back({"fc.weight", {1000, in}});
  all.push_back({"fc.bias", {1000}});
  std::reverse(all.begin(), all.end());
  return all;
}

}  // namespace

std::vector<GradientTensor> gradients_of(const std::string& model) {
  if (model == "resnet18") return resnet(false, {2, 2, 2, 2});
  if (model == "resnet50") return resnet(true, {3, 4, 6, 3});
  std::vector<std::string> vits = model_names();
  if (std::find(vits.begin(), vits.end(), model) == vits.end()) {
    throw BadInput(
        fmt::format("--model '{}' is unknown; use resnet18, resnet50, {}", model, fmt::join(vits, ", ")));
  }
  std::vector<GradientTensor> all;
  for (const VitParameter& p : vit_parameters(named_model(model))) all.push_back({p.name, p.shape});
  return all;
}

int64_t elements_of(const std::vector<GradientTensor>& tensors) {
  int64_t count = 0;
  for (const GradientTensor& t : tensors) count += t.count();
  return count;
}

}  // namespace gradwire::bench
