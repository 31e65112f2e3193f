// softmax and softmax_backward, in place, with the scale and the padding rule fused in.
//
// Rows of up to 1024 floats whose ld is a multiple of 4 stay in registers between the passes: softmax moves 8
// B per element, its backward 12 B, in 16-byte accesses. Other rows go through one block each, with 4-byte
// accesses, and are read again from cache. Limit: memory bandwidth. Deterministic.
#include "kernels/cuda/row_slice.cuh"
#include "kernels/math/exp.h"
#include "kernels/vit.h"

namespace gradwire::cuda {
namespace {

template <int G, int Items>
__global__ void __launch_bounds__(kRowThreads) softmax_slice_kernel(Softmax a) {
  using Slice = RowSlice<G, Items>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * Slice::kRowsPerBlock + Slice::group();
  const bool live = row < a.rows;
  const int width = static_cast<int>(a.width), ld = static_cast<int>(a.ld);
  float* x = a.x + row * a.ld;
  Slice s;
  s.read(x, ld, live);
  float highest = Max::kIdentity;
#pragma unroll
  for (int j = 0; j < Items; ++j) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      s.v[j][k] *= a.scale;
      if (Slice::column(j) + k < width) highest = Max()(s.v[j][k], highest);
    }
  }
  highest = group_reduce<G>(highest, Max());
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < Items; ++j) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      s.v[j][k] = Slice::column(j) + k < width ? exp_float(s.v[j][k] - highest) : 0.0f;
      sum += s.v[j][k];
    }
  }
  const float inverse = 1.0f / group_reduce<G>(sum, Sum());
#pragma unroll
  for (int j = 0; j < Items; ++j) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (Slice::column(j) + k < width) s.v[j][k] *= inverse;
    }
  }
  s.write(x, ld, live);
}

template <int G, int Items>
__global__ void __launch_bounds__(kRowThreads) softmax_backward_slice_kernel(SoftmaxBackward a) {
  using Slice = RowSlice<G, Items>;
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
    for (int k = 0; k < 4; ++k) {
      if (Slice::column(j) + k < width) dot += y.v[j][k] * d.v[j][k];
    }
  }
  dot = group_reduce<G>(dot, Sum());
#pragma unroll
  for (int j = 0; j < Items; ++j) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      d.v[j][k] = Slice::column(j) + k < width ? a.scale * y.v[j][k] * (d.v[j][k] - dot) : 0.0f;
    }
  }
  d.write(a.dy + row * a.ld, ld, live);
}

// One block per row. A thread touches the same elements in every pass, so only the sums need a barrier.
__global__ void __launch_bounds__(kRowThreads) softmax_kernel(Softmax a) {
  __shared__ float shared[32];
  float* x = a.x + static_cast<int64_t>(blockIdx.x) * a.ld;
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
  for (int64_t c = threadIdx.x; c < a.ld; c += blockDim.x) x[c] = c < a.width ? x[c] * inverse : 0.0f;
}

__global__ void __launch_bounds__(kRowThreads) softmax_backward_kernel(SoftmaxBackward a) {
  __shared__ float shared[32];
  const float* y = a.y + static_cast<int64_t>(blockIdx.x) * a.ld;
  float* dy = a.dy + static_cast<int64_t>(blockIdx.x) * a.ld;
  float dot = 0.0f;
  for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x) dot += y[c] * dy[c];
  dot = block_reduce(dot, shared, Sum());
  for (int64_t c = threadIdx.x; c < a.ld; c += blockDim.x) {
    dy[c] = c < a.width ? a.scale * y[c] * (dy[c] - dot) : 0.0f;
  }
}

template <typename... Pointers>
bool sliceable(int64_t ld, Pointers... pointers) {
  return ld <= kLongestSlicedRow && ld % 4 == 0 && ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace

void softmax(CudaStream stream, const Softmax& a) {
  if (a.rows <= 0 || a.ld <= 0) return;
  if (sliceable(a.ld, a.x)) {
    with_row_slice(a.ld, [&]<int G, int Items>() {
      launch("softmax", softmax_slice_kernel<G, Items>, row_slice_launch<G>(stream, a.rows), a);
    });
  } else {
    launch("softmax", softmax_kernel,
           {.grid = dim3(static_cast<unsigned>(a.rows)), .block = dim3(row_threads(a.ld)), .stream = stream},
           a);
  }
}

void softmax_backward(CudaStream stream, const SoftmaxBackward& a) {
  if (a.rows <= 0 || a.ld <= 0) return;
  if (sliceable(a.ld, a.y, a.dy)) {
    with_row_slice(a.ld, [&]<int G, int Items>() {
      launch("softmax_backward", softmax_backward_slice_kernel<G, Items>, row_slice_launch<G>(stream, a.rows),
             a);
    });
  } else {
    launch("softmax_backward", softmax_backward_kernel,
           {.grid = dim3(static_cast<unsigned>(a.rows)), .block = dim3(row_threads(a.ld)), .stream = stream},
           a);
  }
}

}  // namespace gradwire::cuda
