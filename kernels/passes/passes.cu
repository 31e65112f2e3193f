// Passes on CUDA (kernels/passes/passes.h): 16-byte accesses where the arrays share an alignment.
#include "kernels/passes/passes.h"

#include "kernels/cuda/vector.cuh"

namespace gradwire::cuda {

#define GW_DEFINE(op, Args)                   \
  void op(CudaStream stream, const Args& a) { \
    for_each_element(#op, stream, a);         \
  }
GW_PASSES(GW_DEFINE, GW_DEFINE, GW_DEFINE)
#undef GW_DEFINE

// Clipping: one launch for the sums of chunks, one that adds them in every block and scales. A block whose
// array is not clipped ends there.

namespace {

constexpr int kWidth = 4;
static_assert(kClipFold == kVectorThreads && kClipLanes == kWidth * kVectorThreads);

// Adds the threads' values, the upper half to the lower one until one is left; all threads get the sum.
__device__ __forceinline__ double halve(double value, double (&shared)[kClipFold]) {
  const int j = static_cast<int>(threadIdx.x);
  shared[j] = value;
  __syncthreads();
  for (int half = kClipFold / 2; half > 0; half /= 2) {
    if (j < half) shared[j] += shared[j + half];
    __syncthreads();
  }
  return shared[0];
}

// Adds the squares of the chunk's lanes 4 j to 4 j + 3. W: 4 if the array is aligned to 16 bytes.
template <int W>
__device__ __forceinline__ void add_squares(const float* x, int count, double (&lanes)[kWidth]) {
  float values[kClipChunk / kClipLanes][kWidth];
#pragma unroll
  for (int row = 0; row < kClipChunk / kClipLanes; ++row) {
    const int at = row * kClipLanes + static_cast<int>(threadIdx.x) * kWidth;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[row][k] = 0.0f;
    if (W == kWidth && at + kWidth <= count) {
      load<kWidth>(x + at, values[row]);
      continue;
    }
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if (at + k < count) values[row][k] = x[at + k];
    }
  }
#pragma unroll
  for (int row = 0; row < kClipChunk / kClipLanes; ++row) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const double value = is_finite(values[row][k]) ? static_cast<double>(values[row][k]) : 0.0;
      lanes[k] += value * value;
    }
  }
}

__global__ void __launch_bounds__(kVectorThreads) clip_squares_kernel(const __grid_constant__ ClipNorm a) {
  wait_for_earlier_kernels();
  __shared__ double shared[kClipFold];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kClipChunk;
  const int64_t rest = a.count - begin;
  const int count = rest < kClipChunk ? static_cast<int>(rest) : kClipChunk;
  double lanes[kWidth] = {};
  if (reinterpret_cast<uintptr_t>(a.grad) % 16 == 0) {
    add_squares<kWidth>(a.grad + begin, count, lanes);
  } else {
    add_squares<1>(a.grad + begin, count, lanes);
  }
  const double sum = halve(clip_fold(lanes[0], lanes[1], lanes[2], lanes[3]), shared);
  if (threadIdx.x == 0) a.chunks[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kVectorThreads)
    clip_scale_kernel(const __grid_constant__ ClipNorm a, const __grid_constant__ VectorSplit split) {
  wait_for_earlier_kernels();
  __shared__ double shared[kClipFold];
  double lane = 0.0;
  for (int64_t c = threadIdx.x; c < clip_chunks(a.count); c += kClipFold) lane += a.chunks[c];
  const float factor = clip_factor(halve(lane, shared), a.max_norm);
  if (factor != 1.0f) ClipScale{a.grad, factor, a.count}.each(VectorLoop<kWidth>{split});
}

}  // namespace

void clip_norm(CudaStream stream, const ClipNorm& a) {
  if (a.count <= 0) return;
  launch("clip_squares", clip_squares_kernel,
         {.grid = dim3(static_cast<unsigned>(clip_chunks(a.count))),
          .block = dim3(kVectorThreads),
          .stream = stream},
         a);
  launch_vectors<kWidth>("clip_scale", clip_scale_kernel, stream,
                         Alignment(kWidth).with(a.grad).split(a.count), a);
}

}  // namespace gradwire::cuda
