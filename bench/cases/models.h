// The gradients of well-known models: names and shapes, in the order in which backward finishes them.
#pragma once

#include <string>
#include <vector>

#include "collectives/reducer/reducer.h"

namespace gradwire::bench {

// Every ViT of the trainer, resnet18 and resnet50. Any other name throws a BadInput that lists them.
std::vector<GradientTensor> gradients_of(const std::string& model);

int64_t elements_of(const std::vector<GradientTensor>& tensors);

}  // namespace gradwire::bench
