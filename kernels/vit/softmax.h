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

// Arguments of the loss, its gradient, and the number of correct predictions. Per row: loss = -log
// softmax(logits)[label]; d_logits = grad_scale * (softmax - onehot). totals[0] += sum of losses over rows,
// totals[1] += rows whose largest logit (first on ties) is the label; without `accumulate`, = instead of +=.
// Both totals are doubles in device memory; rows are added in fixed order. d_logits may be null (evaluation)
// or equal logits. A label outside 0..classes-1 gives a NaN loss.
template <typename S = float>
struct CrossEntropy {
  const float* logits = nullptr;    // (rows, K)
  const int32_t* labels = nullptr;  // (rows)
  S* d_logits = nullptr;
  double* totals = nullptr;    // (2) in and out
  float* workspace = nullptr;  // (2 * rows) floats
  int64_t rows = 0, classes = 0;
  float grad_scale = 1.0f;  // 1 / rows for the mean
  bool accumulate = true;   // adds to `totals`

  // Whether CUDA reads four logits at once.
  bool vectors() const {
    return classes % 4 == 0 && reinterpret_cast<uintptr_t>(logits) % 16 == 0 &&
           reinterpret_cast<uintptr_t>(d_logits) % (4 * sizeof(S)) == 0;
  }
  static constexpr int64_t kOneBlock = 32;
  // Whether one launch suffices on CUDA: the rows fit a block, and a row fits a warp's registers.
  bool one_block() const { return rows <= kOneBlock && classes <= (vectors() ? 1024 : 256); }
};
GW_TYPED_OP(cross_entropy, CrossEntropy)

}  // namespace gradwire
