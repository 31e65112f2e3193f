// GELU with the bias of the preceding product.
// Shapes and the storage type S: kernels/vit/vit.h.
#pragma once

#include <cstdint>

#include "kernels/math/column_chunks.h"
#include "kernels/math/gelu.h"
#include "kernels/op.h"

namespace gradwire {

// Arguments of GELU: pre = x + bias (in place in x); y = GELU(pre) = pre * Phi(pre), in either form of Phi.
// Moves 12 B (FP32) or 6 B (BF16) per element. Without a bias, x is only read: 8 or 4 B.
template <typename S = float>
struct BiasGelu {
  S* x = nullptr;               // (rows, F) in: product without bias, out: pre-activation, kept for backward
  const float* bias = nullptr;  // (F) elements, or null: x already includes the bias
  S* y = nullptr;               // (rows, F); without a bias it may be x
  int64_t rows = 0, width = 0;
  Gelu form = Gelu::exact;
};
GW_TYPED_OP(bias_gelu, BiasGelu)

// Arguments of the backward pass: d_pre = dy * GELU'(pre); d_bias = the sum of d_pre over rows, before
// rounding. Moves 12 B (FP32) or 6 B (BF16) per element.
template <typename S = float>
struct BiasGeluBackward {
  const S* pre = nullptr;  // (rows, F)
  const S* dy = nullptr;   // (rows, F)
  S* d_pre = nullptr;      // (rows, F) out; may be pre or dy
  float* d_bias = nullptr;
  float* workspace = nullptr;  // column_sum_workspace(rows, width) floats; null: no d_bias
  int64_t rows = 0, width = 0;
  bool accumulate = false;
  bool partial_only = false;  // leave sums() to combine_sums()
  Gelu form = Gelu::exact;

  PartialSums sums() const {
    return {workspace, column_chunks(rows).count, width, width, {d_bias}, accumulate};
  }
};
GW_TYPED_OP(bias_gelu_backward, BiasGeluBackward)

}  // namespace gradwire
