// Softmax over rows: attention's scores.
// Shapes and the storage type S: kernels/vit/vit.h.
#pragma once

#include <cstdint>

#include "kernels/op.h"

namespace gradwire {

// Arguments of softmax: each row of y (rows, ld) becomes softmax(scale * row of x) over its first `width`
// entries. Entries between width and ld become 0, so that padded products are exact. y may equal x. Moves 8 B
// (FP32) or 6 B (BF16) per element.
template <typename S = float>
struct Softmax {
  float* x = nullptr;  // (rows, ld) scores; unspecified afterwards unless x is y
  S* y = nullptr;      // (rows, ld)
  int64_t rows = 0, width = 0, ld = 0;
  float scale = 1.0f;
};
GW_TYPED_OP(softmax, Softmax)

// Arguments of the backward pass: dx = scale * y * (dy - sum(dy * y)), in place over dy; padding becomes 0.
// Moves 12 B (FP32) or 6 B (BF16) per element.
template <typename S = float>
struct SoftmaxBackward {
  const S* y = nullptr;  // (rows, ld), the output of softmax
  S* dy = nullptr;       // (rows, ld) in: dy, out: dx
  int64_t rows = 0, width = 0, ld = 0;
  float scale = 1.0f;
};
GW_TYPED_OP(softmax_backward, SoftmaxBackward)

}  // namespace gradwire
