// The gradients of well-known models: names and shapes, in the order in which backward finishes them.
#pragma once

#include <string>
#include <vector>

#include "collectives/reducer/reducer.h"

namespace gradwire::bench {

// Returns the gradients of a ViT of the trainer, of resnet18 or of resnet50. Throws BadInput, which lists the
// known names, for any other name.
std::vector<GradientTensor> gradients_of(const std::string& model);

int64_t elements_of(const std::vector<GradientTensor>& tensors);

}  // namespace gradwire::bench
