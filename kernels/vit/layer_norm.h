// Layer normalization, with or without a residual branch added first. Shapes and the storage
// type S: kernels/vit/vit.h.
#pragma once

#include <cstdint>

#include "kernels/math/column_chunks.h"
#include "kernels/op.h"

namespace gradwire {

// Arguments of layer normalization: y = (x - mean) * rstd * gamma + beta per row, biased variance, rstd = 1 /
// sqrt(var + eps). Moves 8 B (FP32) or 6 B (BF16) per element.
//
// With `branch`, a residual branch is added first: sum = x + (branch + branch_bias) is stored and normalized.
// The rows of branch and sum have the stride of x. Moves 16 or 12 B per element.
template <typename S = float>
struct LayerNorm {
  const float* x = nullptr;      // (rows, C)
  const float* gamma = nullptr;  // (C)
  const float* beta = nullptr;   // (C)
  S* y = nullptr;                // (rows, C)
  float* mean = nullptr;         // (rows) out, for the backward pass
  float* rstd = nullptr;         // (rows) out, for the backward pass
  int64_t rows = 0, width = 0;
  int64_t x_stride = 0;  // distance between rows of x; 0 means width (the head normalizes every T-th row)
  float eps = 1e-6f;
  const S* branch = nullptr;           // layout of x: a product without its bias, or null
  const float* branch_bias = nullptr;  // (C); used only with a branch
  float* sum = nullptr;                // layout of x: out; used only with a branch; may equal x or branch
};
GW_TYPED_OP(layer_norm, LayerNorm)

// Arguments of the backward pass: dx (+)= gradient with respect to x; d_gamma, d_beta = sums over rows. Moves
// 12 B (FP32) or 10 B (BF16) per element, plus 4 B when accumulating into dx and 2 B with dx_rounded. One
// struct holds all results, because one pass computes them.
template <typename S = float>
struct LayerNormBackward {
  const float* x = nullptr;
  const S* dy = nullptr;
  const float* gamma = nullptr;
  const float* mean = nullptr;
  const float* rstd = nullptr;
  float* dx = nullptr;
  // A rounded copy of dx with the same strides, for the products that follow; null when the products read dx.
  S* dx_rounded = nullptr;
  float* d_gamma = nullptr;
  float* d_beta = nullptr;
  // Sum over rows of the final dx, before rounding: the bias gradient of the product whose result was last
  // added to the residual stream. May be null.
  float* dx_sum = nullptr;
  float* workspace = nullptr;  // layer_norm_backward_workspace(rows, width) floats
  int64_t rows = 0, width = 0;
  int64_t x_stride = 0;        // distance between rows of x and dx; 0 means width
  bool accumulate_dx = false;  // residual branch: dx += instead of dx =
  bool accumulate = false;     // adds to the parameter gradients, including dx_sum
  bool partial_only = false;   // leave sums() to combine_sums()

  PartialSums sums() const {
    return {workspace, column_chunks(rows).count, 3 * width, width, {d_gamma, d_beta, dx_sum}, accumulate};
  }
};
GW_TYPED_OP(layer_norm_backward, LayerNormBackward)
inline int64_t layer_norm_backward_workspace(int64_t rows, int64_t width) {
  return 3 * column_sum_workspace(rows, width);
}

}  // namespace gradwire
