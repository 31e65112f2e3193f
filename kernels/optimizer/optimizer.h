// Optimizer steps over one flat parameter buffer: one pass, one launch.
//
// Values that change between steps (learning rate, bias corrections) are read from device memory, so that a
// captured CUDA graph can be replayed: write an OptimizerScalars there with store() in stream order. The BF16
// copy of the parameters, for products with BF16 operands, is written in the same pass, which moves 2 B per
// element instead of 6 B in a separate pass.
#pragma once

#include <cstdint>

#include "kernels/op.h"

namespace gradwire {

struct OptimizerScalars {
  float lr = 0.0f;
  float correction1 = 1.0f;  // 1 - beta1^t, AdamW only
  float correction2 = 1.0f;  // 1 - beta2^t, AdamW only
};

// PyTorch's SGD: g = grad + weight_decay * w; v = momentum * v + g (v = g in the first step, as with a zeroed
// v); w -= lr * v. Moves 20 B per element with momentum, 12 B without.
struct SgdStep {
  float* params = nullptr;
  const float* grads = nullptr;
  float* velocity = nullptr;  // null when momentum == 0
  int64_t count = 0;
  float momentum = 0.0f, weight_decay = 0.0f;
  const OptimizerScalars* scalars = nullptr;  // device memory
  Bf16* rounded = nullptr;                    // the new params as BF16; may be null
};
GW_OP(sgd_step, SgdStep)

// AdamW (Loshchilov and Hutter, arXiv 1711.05101) as PyTorch computes it: w *= 1 - lr * weight_decay; m = b1
// m + (1-b1) g; v = b2 v + (1-b2) g^2; w -= lr / correction1 * m / (sqrt(v) / sqrt(correction2) + eps). Moves
// 28 B per element.
struct AdamWStep {
  float* params = nullptr;
  const float* grads = nullptr;
  float* m = nullptr;
  float* v = nullptr;
  int64_t count = 0;
  float beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, weight_decay = 0.01f;
  const OptimizerScalars* scalars = nullptr;  // device memory
  Bf16* rounded = nullptr;                    // the new params as BF16; may be null
};
GW_OP(adamw_step, AdamWStep)

}  // namespace gradwire
