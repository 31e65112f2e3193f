// Host split_heads, split_heads_backward and merge_heads: copies of head_dim floats.
#include "kernels/simd/vector.h"
#include "kernels/vit/heads.h"

namespace gradwire::host {
namespace {

// Copies in(token, head, d), plus the bias, to out(token, head, d) for one image; strides in elements; `bias`
// may be null.
template <typename S>
GW_INLINE void move_heads_of(const S* in, int64_t in_token, int64_t in_head, const float* bias, S* out,
                             int64_t out_token, int64_t out_head, int64_t tokens, int64_t heads,
                             int64_t dim) {
  for (int64_t h = 0; h < heads; ++h) {
    const float* head_bias = bias != nullptr ? bias + h * dim : nullptr;
    for (int64_t t = 0; t < tokens; ++t) {
      const S* from = in + t * in_token + h * in_head;
      S* to = out + t * out_token + h * out_head;
      if (head_bias != nullptr) {
#pragma omp simd
        for (int64_t d = 0; d < dim; ++d) to[d] = narrow<S>(widen(from[d]) + head_bias[d]);
      } else {
#pragma omp simd
        for (int64_t d = 0; d < dim; ++d) to[d] = from[d];
      }
    }
  }
}

GW_SIMD void move_heads(const float* in, int64_t in_token, int64_t in_head, const float* bias, float* out,
                        int64_t out_token, int64_t out_head, int64_t tokens, int64_t heads, int64_t dim) {
  move_heads_of(in, in_token, in_head, bias, out, out_token, out_head, tokens, heads, dim);
}
GW_SIMD void move_heads(const Bf16* in, int64_t in_token, int64_t in_head, const float* bias, Bf16* out,
                        int64_t out_token, int64_t out_head, int64_t tokens, int64_t heads, int64_t dim) {
  move_heads_of(in, in_token, in_head, bias, out, out_token, out_head, tokens, heads, dim);
}

}  // namespace

template <typename S>
void split_heads(const SplitHeads<S>& a) {
  const int64_t width = a.heads * a.head_dim, image = a.tokens * width;
  for_rows(a.batch, 3 * image, [&](int64_t begin, int64_t end) {
    S* outputs[3] = {a.q, a.k, a.v};
    for (int64_t b = begin; b < end; ++b) {
      for (int part = 0; part < 3; ++part) {
        move_heads(a.qkv + b * 3 * image + part * width, 3 * width, a.head_dim,
                   a.bias != nullptr ? a.bias + part * width : nullptr, outputs[part] + b * image, a.head_dim,
                   a.tokens * a.head_dim, a.tokens, a.heads, a.head_dim);
      }
    }
  });
}

template <typename S>
void split_heads_backward(const SplitHeadsBackward<S>& a) {
  const int64_t width = a.heads * a.head_dim, image = a.tokens * width;
  for_rows(a.batch, 3 * image, [&](int64_t begin, int64_t end) {
    const S* inputs[3] = {a.dq, a.dk, a.dv};
    for (int64_t b = begin; b < end; ++b) {
      for (int part = 0; part < 3; ++part) {
        move_heads(inputs[part] + b * image, a.head_dim, a.tokens * a.head_dim, nullptr,
                   a.d_qkv + b * 3 * image + part * width, 3 * width, a.head_dim, a.tokens, a.heads,
                   a.head_dim);
      }
    }
  });
}

template <typename S>
void merge_heads(const MergeHeads<S>& a) {
  const int64_t width = a.heads * a.head_dim, image = a.tokens * width, head = a.tokens * a.head_dim;
  for_rows(a.batch, image, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      if (a.inverse) {
        move_heads(a.in + b * image, width, a.head_dim, nullptr, a.out + b * image, a.head_dim, head,
                   a.tokens, a.heads, a.head_dim);
      } else {
        move_heads(a.in + b * image, a.head_dim, head, nullptr, a.out + b * image, width, a.head_dim,
                   a.tokens, a.heads, a.head_dim);
      }
    }
  });
}

GW_INSTANTIATE_OP(split_heads, SplitHeads)
GW_INSTANTIATE_OP(split_heads_backward, SplitHeadsBackward)
GW_INSTANTIATE_OP(merge_heads, MergeHeads)

}  // namespace gradwire::host
