// split_heads, split_heads_backward and merge_heads: permutations of runs of head_dim elements.
//
// A thread keeps its column of the (B * T, 3C) or (B * T, C) side, so the column is divided into part, head
// and dim only once. This side is read or written in whole lines, the other side in runs of head_dim
// elements. Limit: memory bandwidth.
#include "kernels/cuda/vector.cuh"
#include "kernels/vit/heads.h"

namespace gradwire::cuda {
namespace {

// The place of a merged column on the split side, (B, H, T, D), relative to image and token.
struct Place {
  int64_t offset = 0;  // head * tokens * dim + d
  int part = 0;        // q, k or v
};

struct Layout {
  int64_t tokens, heads, dim;
  __device__ __forceinline__ Place place(int64_t c) const {
    const int64_t width = heads * dim;
    const int64_t part = c / width, within = c - part * width;
    const int64_t head = within / dim;
    return {head * tokens * dim + (within - head * dim), static_cast<int>(part)};
  }
  // Returns the element of the split side for row (image, token).
  __device__ __forceinline__ int64_t element(int64_t row, const Place& p) const {
    const int64_t image = row / tokens, token = row - image * tokens;
    return image * heads * tokens * dim + token * dim + p.offset;
  }
};

template <int W>
struct BiasedPlace {
  Place place;
  float bias[W];
};

template <typename S>
struct Split {
  Layout layout;
  const S* qkv;
  const float* bias;
  S *q, *k, *v;

  template <int W>
  __device__ __forceinline__ BiasedPlace<W> column(int64_t c) const {
    BiasedPlace<W> out{layout.place(c), {}};
    if (bias != nullptr) load<W>(bias + c, out.bias);
    return out;
  }
  template <int W>
  __device__ __forceinline__ void at(int64_t row, int64_t c, const BiasedPlace<W>& p) const {
    float x[W];
    load<W>(qkv + row * 3 * layout.heads * layout.dim + c, x);
    add<W>(p.bias, x);
    S* out = p.place.part == 0 ? q : p.place.part == 1 ? k : v;
    store<W>(out + layout.element(row, p.place), x);
  }
};

template <typename S>
struct SplitBackward {
  Layout layout;
  const S *dq, *dk, *dv;
  S* d_qkv;

  template <int W>
  __device__ __forceinline__ Place column(int64_t c) const {
    return layout.place(c);
  }
  template <int W>
  __device__ __forceinline__ void at(int64_t row, int64_t c, const Place& p) const {
    const S* in = p.part == 0 ? dq : p.part == 1 ? dk : dv;
    float x[W];
    load<W>(in + layout.element(row, p), x);
    store<W>(d_qkv + row * 3 * layout.heads * layout.dim + c, x);
  }
};

template <typename S>
struct Merge {
  Layout layout;
  const S* in;
  S* out;
  bool inverse;

  template <int W>
  __device__ __forceinline__ Place column(int64_t c) const {
    return layout.place(c);
  }
  template <int W>
  __device__ __forceinline__ void at(int64_t row, int64_t c, const Place& p) const {
    const int64_t merged = row * layout.heads * layout.dim + c, split = layout.element(row, p);
    float x[W];
    load<W>(in + (inverse ? merged : split), x);
    store<W>(out + (inverse ? split : merged), x);
  }
};

}  // namespace

template <typename S>
void split_heads(CudaStream stream, const SplitHeads<S>& a) {
  for_columns<S>("split_heads", stream, takes_vectors<S>(a.head_dim, a.qkv, a.bias, a.q, a.k, a.v),
                 Split<S>{{a.tokens, a.heads, a.head_dim}, a.qkv, a.bias, a.q, a.k, a.v}, a.batch * a.tokens,
                 3 * a.heads * a.head_dim);
}

template <typename S>
void split_heads_backward(CudaStream stream, const SplitHeadsBackward<S>& a) {
  for_columns<S>("split_heads_backward", stream, takes_vectors<S>(a.head_dim, a.dq, a.dk, a.dv, a.d_qkv),
                 SplitBackward<S>{{a.tokens, a.heads, a.head_dim}, a.dq, a.dk, a.dv, a.d_qkv},
                 a.batch * a.tokens, 3 * a.heads * a.head_dim);
}

template <typename S>
void merge_heads(CudaStream stream, const MergeHeads<S>& a) {
  for_columns<S>("merge_heads", stream, takes_vectors<S>(a.head_dim, a.in, a.out),
                 Merge<S>{{a.tokens, a.heads, a.head_dim}, a.in, a.out, a.inverse}, a.batch * a.tokens,
                 a.heads * a.head_dim);
}

GW_INSTANTIATE_CUDA_OP(split_heads, SplitHeads)
GW_INSTANTIATE_CUDA_OP(split_heads_backward, SplitHeadsBackward)
GW_INSTANTIATE_CUDA_OP(merge_heads, MergeHeads)

}  // namespace gradwire::cuda
