// Biases and residual branches, and the gradient of a bias: a sum over columns.
// Shapes and the storage type S: kernels/vit/vit.h.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

#include "kernels/math/column_chunks.h"
#include "kernels/op.h"

namespace gradwire {

// Arguments of x (rows, C) = residual + y + bias: a residual branch and the bias of the preceding product, in
// one pass. Moves 12 B (FP32) or 10 B (BF16) per element. With residual == null: x = y + bias, and y may
// equal x.
template <typename S = float>
struct BiasResidual {
  const S* y = nullptr;             // (rows, C)
  const float* bias = nullptr;      // (C)
  const float* residual = nullptr;  // (rows, C) or null
  float* x = nullptr;               // (rows, C) out; may equal residual or y
  int64_t rows = 0, width = 0;
};
GW_TYPED_OP(bias_residual, BiasResidual)

// Arguments of sum (C) = column sums of x (rows, C): a bias gradient. Reads 4 B (FP32) or 2 B (BF16) per
// element. A batch of arrays `stride` elements apart, with consecutive partial sums, requires partial_only.
template <typename S = float>
struct ColumnSum {
  const S* x = nullptr;
  float* sum = nullptr;
  float* workspace = nullptr;  // batch * column_sum_workspace(rows, width) floats
  int64_t rows = 0, width = 0;
  bool accumulate = false;
  bool partial_only = false;  // leave sums() to combine_sums(); in a batch sums(i, sum of array i)
  int64_t batch = 1, stride = 0;

  PartialSums sums() const { return sums(0, sum); }
  PartialSums sums(int64_t i, float* to) const {
    const int64_t count = column_chunks(rows).count;
    return {workspace + i * count * width, count, width, width, {to}, accumulate};
  }
  // Returns the rows of x as partial sums: for few rows (kMostChunks), combine_sums() can add them without
  // column_sum().
  PartialSums of_rows() const {
    PartialSums of{nullptr, rows, width, width, {sum}, accumulate};
    if constexpr (std::is_same_v<S, float>)
      of.partial = x;
    else
      of.partial_bf16 = x;
    return of;
  }
};
GW_TYPED_OP(column_sum, ColumnSum)

// Arguments of the second stage of the sums of several ops with `partial_only`, in one launch. The workspaces
// of these ops must still hold their partial sums.
struct CombineSums {
  // Four sums for each of eight layers, and two sums for a classifier head.
  static constexpr size_t kMost = 34;
  std::array<PartialSums, kMost> of = {};  // ignores entries without partial sums
};
GW_OP(combine_sums, CombineSums)

}  // namespace gradwire
