// What a training step costs in arithmetic: the yardstick for TFLOP/s in the log.
#pragma once

#include "trainer/config/config.h"

namespace gradwire {

// FLOPs of the matrix products in one image's forward and backward pass, a multiplication and an addition
// counting as two. Backward costs each product twice, for the gradients by its weight (or right operand) and
// by its input, but nobody asks for the gradient by the pixels. The padding of attention matrices does not
// count.
double training_flops_per_image(const VitConfig& config);

}  // namespace gradwire
