// FLOPs of a training step, for the log's TFLOP/s.
#pragma once

#include "trainer/config/config.h"

namespace gradwire {

// FLOPs of the matrix products in one image's forward and backward pass; a multiply-add counts as two.
// Backward needs two products for each of forward's, for the gradients by its weight (or right operand) and
// by its input, but no gradient by the pixels. The padding of attention matrices is not counted.
double training_flops_per_image(const VitConfig& config);

}  // namespace gradwire
