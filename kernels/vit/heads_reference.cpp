// Scalar reference of the formulas in heads.h, with every sum in double.
#include "kernels/vit/heads.h"

namespace gradwire::reference {

template <typename S>
void split_heads(const SplitHeads<S>& a) {
  const int64_t width = a.heads * a.head_dim;
  S* outputs[3] = {a.q, a.k, a.v};
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t t = 0; t < a.tokens; ++t) {
      for (int64_t i = 0; i < 3 * width; ++i) {
        int64_t c = i % width, h = c / a.head_dim, d = c % a.head_dim;
        outputs[i / width][((b * a.heads + h) * a.tokens + t) * a.head_dim + d] = narrow<S>(
            widen(a.qkv[(b * a.tokens + t) * 3 * width + i]) + (a.bias != nullptr ? a.bias[i] : 0.0f));
      }
    }
  }
}

template <typename S>
void split_heads_backward(const SplitHeadsBackward<S>& a) {
  const int64_t width = a.heads * a.head_dim;
  const S* inputs[3] = {a.dq, a.dk, a.dv};
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t t = 0; t < a.tokens; ++t) {
      for (int64_t i = 0; i < 3 * width; ++i) {
        int64_t c = i % width, h = c / a.head_dim, d = c % a.head_dim;
        a.d_qkv[(b * a.tokens + t) * 3 * width + i] =
            inputs[i / width][((b * a.heads + h) * a.tokens + t) * a.head_dim + d];
      }
    }
  }
}

template <typename S>
void merge_heads(const MergeHeads<S>& a) {
  const int64_t width = a.heads * a.head_dim;
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t t = 0; t < a.tokens; ++t) {
      for (int64_t c = 0; c < width; ++c) {
        int64_t split = ((b * a.heads + c / a.head_dim) * a.tokens + t) * a.head_dim + c % a.head_dim;
        int64_t merged = (b * a.tokens + t) * width + c;
        if (a.inverse) {
          a.out[split] = a.in[merged];
        } else {
          a.out[merged] = a.in[split];
        }
      }
    }
  }
}

GW_INSTANTIATE_OP(split_heads, SplitHeads)
GW_INSTANTIATE_OP(split_heads_backward, SplitHeadsBackward)
GW_INSTANTIATE_OP(merge_heads, MergeHeads)

}  // namespace gradwire::reference
