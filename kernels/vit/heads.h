// Conversions between the layout of a product (a row per token) and that of attention (a matrix per head).
// Shapes and the storage type S: kernels/vit/vit.h.
#pragma once

#include <cstdint>

#include "kernels/op.h"

namespace gradwire {

// Splits qkv (B, T, 3C) + bias (3C) into q, k, v, each (B, H, T, D). 24 or 12 B per (b, t, c).
template <typename S = float>
struct SplitHeads {
  const S* qkv = nullptr;
  const float* bias = nullptr;  // null: no bias
  S* q = nullptr;
  S* k = nullptr;
  S* v = nullptr;
  int64_t batch = 0, tokens = 0, heads = 0, head_dim = 0;
};
GW_TYPED_SIDES(split_heads, SplitHeads)
template <typename S = float>
void split_heads(const Stream& stream, const SplitHeads<S>& args) {
  detail::dispatch(stream, args, host::split_heads<S>, GW_CUDA_SIDE(split_heads<S>), "split_heads");
}

// The inverse for gradients: dq, dk, dv (B, H, T, D) -> d_qkv (B, T, 3C). 24 or 12 B per (b, t, c).
template <typename S = float>
struct SplitHeadsBackward {
  const S* dq = nullptr;
  const S* dk = nullptr;
  const S* dv = nullptr;
  S* d_qkv = nullptr;
  int64_t batch = 0, tokens = 0, heads = 0, head_dim = 0;
};
GW_TYPED_SIDES(split_heads_backward, SplitHeadsBackward)
template <typename S = float>
void split_heads_backward(const Stream& stream, const SplitHeadsBackward<S>& args) {
  detail::dispatch(stream, args, host::split_heads_backward<S>, GW_CUDA_SIDE(split_heads_backward<S>),
                   "split_heads_backward");
}

// Merges (B, H, T, D) into (B, T, C), or splits with `inverse`. 8 or 4 B per element.
template <typename S = float>
struct MergeHeads {
  const S* in = nullptr;
  S* out = nullptr;
  int64_t batch = 0, tokens = 0, heads = 0, head_dim = 0;
  bool inverse = false;
};
GW_TYPED_SIDES(merge_heads, MergeHeads)
template <typename S = float>
void merge_heads(const Stream& stream, const MergeHeads<S>& args) {
  detail::dispatch(stream, args, host::merge_heads<S>, GW_CUDA_SIDE(merge_heads<S>), "merge_heads");
}

}  // namespace gradwire
