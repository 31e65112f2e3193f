// Attention of all heads in one pass, without matrices of scores in memory.
// Shapes and the storage type S: kernels/vit/vit.h.
//
// On CUDA attention() and attention_backward() are one kernel each, for sequences that fit into shared
// memory. Longer sequences, and the host, use split_heads, batched products, softmax and merge_heads.
// fuses_attention() decides for a model. On the host these two ops are their references.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/math/column_chunks.h"
#include "kernels/op.h"

namespace gradwire {

// The number of queries, or of keys, per warp and step.
inline constexpr int64_t kAttentionTile = 16;

// Returns the factor that scales the scores.
inline float attention_scale(int64_t head_dim) {
  return 1.0f / std::sqrt(static_cast<float>(head_dim));
}

// Returns whether attention() and attention_backward() support these sizes on the device and are preferable:
// on CUDA, heads of up to 64 elements whose queries, keys, values and gradients fit into a block's shared
// memory. 197 tokens need 118 KB with BF16, 224 KB with FP32.
namespace cuda {
template <typename S>
bool attention_fits(int64_t tokens, int64_t head_dim);
}  // namespace cuda
template <typename S>
bool fuses_attention([[maybe_unused]] const Device& device, [[maybe_unused]] int64_t tokens,
                     [[maybe_unused]] int64_t head_dim) {
#ifdef GRADWIRE_HAS_CUDA
  if (!device.is_host()) {
    detail::make_current(device);
    return cuda::attention_fits<S>(tokens, head_dim);
  }
#endif
  return false;
}

// Arguments of attention: merged (B, T, C) = softmax(Q K^T / sqrt(D)) V of each head; qkv (B, T, 3C) holds Q,
// K and V with their biases. Moves 16 B (FP32) or 8 B (BF16) per element (b, t, c).
template <typename S = float>
struct Attention {
  const S* qkv = nullptr;
  S* merged = nullptr;
  float* statistics = nullptr;  // (B, H, T, 2) per row: the largest score, and 1 / sum; null: not stored
  int64_t batch = 0, tokens = 0, heads = 0, head_dim = 0;
};
GW_TYPED_OP(attention, Attention)

// Arguments of the backward pass: computes d_qkv (B, T, 3C) and d_bias (3C), the sum of d_qkv over rows
// before rounding. Moves 32 B (FP32) or 16 B (BF16) per element (b, t, c).
template <typename S = float>
struct AttentionBackward {
  const S* qkv = nullptr;
  const S* merged = nullptr;    // the output of attention()
  const S* d_merged = nullptr;  // (B, T, C)
  const float* statistics = nullptr;
  S* d_qkv = nullptr;  // may equal qkv
  float* d_bias = nullptr;
  float* workspace = nullptr;  // size: attention_backward_workspace() floats
  int64_t batch = 0, tokens = 0, heads = 0, head_dim = 0;
  bool accumulate = false;    // adds to d_bias
  bool partial_only = false;  // leave sums() to combine_sums()

  PartialSums sums() const {
    const int64_t width = 3 * heads * head_dim, tiles = (tokens + kAttentionTile - 1) / kAttentionTile;
    return {workspace, batch * tiles, width, width, {d_bias}, accumulate};
  }
};
GW_TYPED_OP(attention_backward, AttentionBackward)

// Returns the size of the workspace, in floats, for a partial sum of d_bias per image and tile.
constexpr int64_t attention_backward_workspace(int64_t batch, int64_t tokens, int64_t width) {
  return batch * ((tokens + kAttentionTile - 1) / kAttentionTile) * 3 * width;
}

}  // namespace gradwire
