// FLOPs of a training step, for the log's TFLOP/s.
#pragma once

#include "trainer/config/config.h"

namespace gradwire {

// Returns the FLOPs of the matrix products in one image's forward and backward pass; a multiply-add counts as
// two. Backward needs two products for each product of forward: for the gradients with respect to the weight
// (or right operand) and to the input. The model computes no gradient with respect to the pixels. The padding
// of attention matrices is not counted.
double training_flops_per_image(const VitConfig& config);

}  // namespace gradwire
