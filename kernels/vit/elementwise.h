// Element-wise ops of the ViT and sums over rows. Shapes and the storage type S: kernels/vit/vit.h.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

#include "kernels/math/column_chunks.h"
#include "kernels/math/gelu.h"
#include "kernels/op.h"

namespace gradwire {

// A matrix (B, H, T, D) for each of one or three parts, such as q, k and v, and the rows (B, T, parts * C)
// that hold the parts side by side. split_heads: parts = rows + bias; merge_heads: rows = parts, the inverse,
// without the bias. Moves 8 B (FP32) or 4 B (BF16) per element of the rows.
template <typename S = float>
struct Heads {
  S* rows = nullptr;
  std::array<S*, 3> parts = {};  // null: the second and third of one part
  int64_t batch = 0, tokens = 0, heads = 0, head_dim = 0;
  const float* bias = nullptr;  // (parts * C), only to split; null: no bias

  int64_t count() const { return (parts[1] != nullptr ? 3 : 1) * heads; }
  int64_t width() const { return count() * head_dim; }
};

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

  PartialSums sums(int64_t i = 0, float* to = nullptr) const {
    const int64_t count = column_chunks(rows).count;
    return {workspace + i * count * width, count, width, width, {to != nullptr ? to : sum}, accumulate};
  }
  // Returns the rows of x as partial sums: for few rows (kMaxChunks), combine_sums() can add them without
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

// Arguments of the second stage of the sums of several ops with `partial_only`, in one launch. The workspaces
// of these ops must still hold their partial sums.
struct CombineSums {
  // Four sums for each of eight layers, and two sums for a classifier head.
  static constexpr size_t kMax = 34;
  std::array<PartialSums, kMax> of = {};  // ignores entries without partial sums
};
GW_OP(combine_sums, CombineSums)

// Arguments of GELU of a product, which has added its bias: y = GELU(x) = x * Phi(x), in either form of Phi.
// Moves 8 B (FP32) or 4 B (BF16) per element.
template <typename S = float>
struct BiasGelu {
  const S* x = nullptr;  // (rows, F) the pre-activation, kept for backward
  S* y = nullptr;        // (rows, F); may be x
  int64_t rows = 0, width = 0;
  Gelu form = Gelu::exact;
};

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

// Arguments of patchify: patches(b, i, ch*p*p + y*p + x) = images(b, ch, (i / grid)*p + y, (i % grid)*p + x):
// the operand of the patch convolution as a product. Moves 8 B (FP32) or 6 B (BF16) per pixel. Image pixels
// beyond grid * patch are not used.
template <typename S = float>
struct Patchify {
  const float* images = nullptr;  // (B, channels, image, image)
  S* patches = nullptr;           // (B, grid * grid, channels * patch * patch), grid = image / patch
  int64_t batch = 0;
  int32_t channels = 0, image = 0, patch = 0;
};

// Arguments of the assembly of tokens: x(b, 0) = class_token + position(0); x(b, 1 + i) = projected(b, i) +
// bias + position(1 + i). Moves 8 B (FP32) or 6 B (BF16) per element.
template <typename S = float>
struct AssembleTokens {
  const S* projected = nullptr;        // (B, T-1, C) patch projection without bias
  const float* bias = nullptr;         // (C)
  const float* class_token = nullptr;  // (C)
  const float* position = nullptr;     // (T, C)
  float* x = nullptr;                  // (B, T, C) out
  int64_t batch = 0, tokens = 0, width = 0;
};

// Arguments of the backward pass. From dx (B, T, C): d_projected (B, T-1, C) = dx without row 0 of each
// image; d_position (T, C), d_class_token (C) and d_bias (C) are sums over the batch (and over patches for
// d_bias). Moves 8 B (FP32) or 6 B (BF16) per element.
template <typename S = float>
struct AssembleTokensBackward {
  const float* dx = nullptr;
  S* d_projected = nullptr;
  float* d_bias = nullptr;
  float* d_class_token = nullptr;
  float* d_position = nullptr;
  float* workspace = nullptr;  // (T-1, C) floats; not used on the host
  int64_t batch = 0, tokens = 0, width = 0;
  bool accumulate = false;  // adds to the parameter gradients; d_projected is overwritten
};

#define GW_ELEMENTWISE_OPS(OP)             \
  OP(split_heads, Heads)                   \
  OP(merge_heads, Heads)                   \
  OP(column_sum, ColumnSum)                \
  OP(bias_gelu, BiasGelu)                  \
  OP(bias_gelu_backward, BiasGeluBackward) \
  OP(patchify, Patchify)                   \
  OP(assemble_tokens, AssembleTokens)      \
  OP(assemble_tokens_backward, AssembleTokensBackward)
GW_ELEMENTWISE_OPS(GW_TYPED_OP)

}  // namespace gradwire
