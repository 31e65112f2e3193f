// FLOPs of a training step, for the log's TFLOP/s.
#pragma once

#include "trainer/config/config.h"

namespace gradwire {

// Returns the FLOPs of the matrix products in one image's forward and backward pass; a multiply-add counts as
// two. Backward needs two products for each product of forward: for the gradients by the weight (or right
// operand) and by the input. No gradient by the pixels is computed. The padding of attention matrices is not
// counted.
double training_flops_per_image(const VitConfig& config);

}  // namespace gradwire
