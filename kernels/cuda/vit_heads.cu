// split_heads, split_heads_backward and merge_heads: permutations that keep runs of head_dim floats together.
//
// A thread keeps its column of the (B * T, 3C) or (B * T, C) side, so the column is divided into part, head
// and dim once. That side is read or written in whole lines, the other in runs of head_dim. Limit: memory
// bandwidth.
#include "kernels/cuda/columns.cuh"
#include "kernels/vit.h"

namespace gradwire::cuda {
namespace {

// Where a column of the merged side lies on the split side, (B, H, T, D), apart from image and token.
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
  // Element of the split side for row (image, token).
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

struct Split {
  Layout layout;
  const float *qkv, *bias;
  float *q, *k, *v;

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
    float* out = p.place.part == 0 ? q : p.place.part == 1 ? k : v;
    store<W>(out + layout.element(row, p.place), x);
  }
};

struct SplitBackward {
  Layout layout;
  const float *dq, *dk, *dv;
  float* d_qkv;

  template <int W>
  __device__ __forceinline__ Place column(int64_t c) const {
    return layout.place(c);
  }
  template <int W>
  __device__ __forceinline__ void at(int64_t row, int64_t c, const Place& p) const {
    const float* in = p.part == 0 ? dq : p.part == 1 ? dk : dv;
    float x[W];
    load<W>(in + layout.element(row, p), x);
    store<W>(d_qkv + row * 3 * layout.heads * layout.dim + c, x);
  }
};

struct Merge {
  Layout layout;
  const float* in;
  float* out;
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

void split_heads(CudaStream stream, const SplitHeads& a) {
  for_columns("split_heads", stream, takes_float4(a.head_dim, a.qkv, a.bias, a.q, a.k, a.v),
              Split{{a.tokens, a.heads, a.head_dim}, a.qkv, a.bias, a.q, a.k, a.v}, a.batch * a.tokens,
              3 * a.heads * a.head_dim);
}

void split_heads_backward(CudaStream stream, const SplitHeadsBackward& a) {
  for_columns("split_heads_backward", stream, takes_float4(a.head_dim, a.dq, a.dk, a.dv, a.d_qkv),
              SplitBackward{{a.tokens, a.heads, a.head_dim}, a.dq, a.dk, a.dv, a.d_qkv}, a.batch * a.tokens,
              3 * a.heads * a.head_dim);
}

void merge_heads(CudaStream stream, const MergeHeads& a) {
  for_columns("merge_heads", stream, takes_float4(a.head_dim, a.in, a.out),
              Merge{{a.tokens, a.heads, a.head_dim}, a.in, a.out, a.inverse}, a.batch * a.tokens,
              a.heads * a.head_dim);
}

}  // namespace gradwire::cuda
