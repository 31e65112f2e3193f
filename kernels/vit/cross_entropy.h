// The loss: softmax, cross entropy and its gradient, and the number of correct predictions.
// Shapes and the storage type S: kernels/vit/vit.h.
#pragma once

#include <cstdint>

#include "kernels/op.h"

namespace gradwire {

// Arguments of the loss. Per row: loss = -log softmax(logits)[label]; d_logits = grad_scale * (softmax -
// onehot). totals[0] += sum of losses over rows, totals[1] += rows whose largest logit (first on ties) is the
// label; without `accumulate`, = instead of +=. Both totals are doubles in device memory; rows are added in
// order. d_logits may be null (evaluation) or equal logits. A label outside 0..classes-1 gives a NaN loss.
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

  static constexpr int64_t kOneBlock = 32;  // rows that one launch handles on CUDA
};
GW_TYPED_OP(cross_entropy, CrossEntropy)

}  // namespace gradwire
