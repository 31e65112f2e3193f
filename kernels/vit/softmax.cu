// softmax and softmax_backward, fused with the scale and the zeroing of the padding.
//
// Rows of up to 1024 elements whose ld is a multiple of 4 (8 with BF16 operands) stay in registers between
// the passes: softmax moves 8 B (FP32) or 6 B (BF16) per element, and its backward pass 12 or 6 B, in 16-byte
// accesses. Other rows are processed by one block each, with 4-byte accesses, and read again from cache.
// Limit: memory bandwidth. Deterministic.
#include "kernels/cuda/vector.cuh"
#include "kernels/math/gelu.h"
#include "kernels/vit/softmax.h"

namespace gradwire::cuda {
namespace {

template <int G, int Items, typename S>
__global__ void __launch_bounds__(kRowThreads) softmax_slice_kernel(Softmax<S> a) {
  constexpr int V = kVector<S>;
  using Slice = RowSlice<G, Items, V>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * Slice::kRowsPerBlock + Slice::group();
  const bool live = row < a.rows;
  const int width = static_cast<int>(a.width), ld = static_cast<int>(a.ld);
  Slice s;
  s.read(a.x + row * a.ld, ld, live);
  float highest = Max::kIdentity;
#pragma unroll
  for (int j = 0; j < Items; ++j) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      s.v[j][k] *= a.scale;
      if (Slice::column(j) + k < width) highest = Max()(s.v[j][k], highest);
    }
  }
  highest = group_reduce<G>(highest, Max());
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < Items; ++j) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      s.v[j][k] = Slice::column(j) + k < width ? exp_float(s.v[j][k] - highest) : 0.0f;
      sum += s.v[j][k];
    }
  }
  const float inverse = 1.0f / group_reduce<G>(sum, Sum());
#pragma unroll
  for (int j = 0; j < Items; ++j) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (Slice::column(j) + k < width) s.v[j][k] *= inverse;
    }
  }
  s.write(a.y + row * a.ld, ld, live);
}

template <int G, int Items, typename S>
__global__ void __launch_bounds__(kRowThreads) softmax_backward_slice_kernel(SoftmaxBackward<S> a) {
  constexpr int V = kVector<S>;
  using Slice = RowSlice<G, Items, V>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * Slice::kRowsPerBlock + Slice::group();
  const bool live = row < a.rows;
  const int width = static_cast<int>(a.width), ld = static_cast<int>(a.ld);
  Slice y, d;
  y.read(a.y + row * a.ld, ld, live);
  d.read(a.dy + row * a.ld, ld, live);
  float dot = 0.0f;
#pragma unroll
  for (int j = 0; j < Items; ++j) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (Slice::column(j) + k < width) dot += y.v[j][k] * d.v[j][k];
    }
  }
  dot = group_reduce<G>(dot, Sum());
#pragma unroll
  for (int j = 0; j < Items; ++j) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      d.v[j][k] = Slice::column(j) + k < width ? a.scale * y.v[j][k] * (d.v[j][k] - dot) : 0.0f;
    }
  }
  d.write(a.dy + row * a.ld, ld, live);
}

// Processes one row per block. A thread accesses the same elements in every pass, so only the sums need a
// barrier.
template <typename S>
__global__ void __launch_bounds__(kRowThreads) softmax_kernel(Softmax<S> a) {
  __shared__ float shared[32];
  float* x = a.x + static_cast<int64_t>(blockIdx.x) * a.ld;
  S* y = a.y + static_cast<int64_t>(blockIdx.x) * a.ld;
  float highest = Max::kIdentity;
  for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x) highest = Max()(a.scale * x[c], highest);
  highest = block_reduce(highest, shared, Max());
  float sum = 0.0f;
  for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x) {
    const float e = exp_float(a.scale * x[c] - highest);
    x[c] = e;
    sum += e;
  }
  const float inverse = 1.0f / block_reduce(sum, shared, Sum());
  for (int64_t c = threadIdx.x; c < a.ld; c += blockDim.x)
    y[c] = narrow<S>(c < a.width ? x[c] * inverse : 0.0f);
}

template <typename S>
__global__ void __launch_bounds__(kRowThreads) softmax_backward_kernel(SoftmaxBackward<S> a) {
  __shared__ float shared[32];
  const S* y = a.y + static_cast<int64_t>(blockIdx.x) * a.ld;
  S* dy = a.dy + static_cast<int64_t>(blockIdx.x) * a.ld;
  float dot = 0.0f;
  for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x) dot += widen(y[c]) * widen(dy[c]);
  dot = block_reduce(dot, shared, Sum());
  for (int64_t c = threadIdx.x; c < a.ld; c += blockDim.x) {
    dy[c] = narrow<S>(c < a.width ? a.scale * widen(y[c]) * (widen(dy[c]) - dot) : 0.0f);
  }
}

template <typename S, typename... Pointers>
bool sliceable(int64_t ld, Pointers... pointers) {
  return ld <= kLongestSlicedRow && ld % kVector<S> == 0 &&
         ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace

template <typename S>
void softmax(CudaStream stream, const Softmax<S>& a) {
  if (a.rows <= 0 || a.ld <= 0) return;
  if (sliceable<S>(a.ld, a.x, a.y)) {
    with_row_slice<kVector<S>>(a.ld, [&]<int G, int Items>() {
      launch("softmax", softmax_slice_kernel<G, Items, S>, row_slice_launch<G>(stream, a.rows), a);
    });
  } else {
    launch("softmax", softmax_kernel<S>,
           {.grid = dim3(static_cast<unsigned>(a.rows)), .block = dim3(row_threads(a.ld)), .stream = stream},
           a);
  }
}

template <typename S>
void softmax_backward(CudaStream stream, const SoftmaxBackward<S>& a) {
  if (a.rows <= 0 || a.ld <= 0) return;
  if (sliceable<S>(a.ld, a.y, a.dy)) {
    with_row_slice<kVector<S>>(a.ld, [&]<int G, int Items>() {
      launch("softmax_backward", softmax_backward_slice_kernel<G, Items, S>,
             row_slice_launch<G>(stream, a.rows), a);
    });
  } else {
    launch("softmax_backward", softmax_backward_kernel<S>,
           {.grid = dim3(static_cast<unsigned>(a.rows)), .block = dim3(row_threads(a.ld)), .stream = stream},
           a);
  }
}

GW_INSTANTIATE_CUDA_OP(softmax, Softmax)
GW_INSTANTIATE_CUDA_OP(softmax_backward, SoftmaxBackward)

}  // namespace gradwire::cuda
