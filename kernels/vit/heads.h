// Conversions between the layout of a product (a row per token) and the layout of attention (a matrix per
// head). Shapes and the storage type S: kernels/vit/vit.h.
#pragma once

#include <cstdint>

#include "kernels/op.h"

namespace gradwire {

// Splits qkv (B, T, 3C) + bias (3C) into q, k, v, each (B, H, T, D). Moves 24 B (FP32) or 12 B (BF16) per
// element (b, t, c).
template <typename S = float>
struct SplitHeads {
  const S* qkv = nullptr;
  const float* bias = nullptr;  // null: no bias
  S* q = nullptr;
  S* k = nullptr;
  S* v = nullptr;
  int64_t batch = 0, tokens = 0, heads = 0, head_dim = 0;
};
GW_TYPED_OP(split_heads, SplitHeads)

// Merges gradients, the inverse of the split: dq, dk, dv (B, H, T, D) -> d_qkv (B, T, 3C). Moves 24 B (FP32)
// or 12 B (BF16) per element (b, t, c).
template <typename S = float>
struct SplitHeadsBackward {
  const S* dq = nullptr;
  const S* dk = nullptr;
  const S* dv = nullptr;
  S* d_qkv = nullptr;
  int64_t batch = 0, tokens = 0, heads = 0, head_dim = 0;
};
GW_TYPED_OP(split_heads_backward, SplitHeadsBackward)

// Merges (B, H, T, D) into (B, T, C), or splits with `inverse`. Moves 8 B (FP32) or 4 B (BF16) per element.
template <typename S = float>
struct MergeHeads {
  const S* in = nullptr;
  S* out = nullptr;
  int64_t batch = 0, tokens = 0, heads = 0, head_dim = 0;
  bool inverse = false;
};
GW_TYPED_OP(merge_heads, MergeHeads)

}  // namespace gradwire
