// Random-k on CUDA (see kernels/randk/randk.h). One launch processes the chosen elements, one thread per
// element. The next launch processes all other elements with 16-byte accesses, and looks up a tensor only for
// a non-finite element.
#include "kernels/randk/randk.h"

#include <cfloat>

#include "kernels/cuda/vector.cuh"
#include "kernels/math/small_float.h"

namespace gradwire::cuda {
namespace {

constexpr int kWidth = 4;

struct GatherArgs : RandKGather {
  const RandKTensor* tensors;
  int tensor_count;
  int64_t value_count;
};

// Returns the last tensor whose `first` is at most `at`, or -1.
__device__ __forceinline__ int find_tensor(const GatherArgs& a, int64_t RandKTensor::*first, int64_t at) {
  int low = 0, high = a.tensor_count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (a.tensors[middle].*first <= at) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - 1;
}

__global__ void __launch_bounds__(kVectorThreads) randk_take_kernel(const __grid_constant__ GatherArgs a) {
  wait_for_earlier_kernels();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t value = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; value < a.value_count;
       value += stride) {
    const RandKTensor t = a.tensors[find_tensor(a, &RandKTensor::packed, value)];
    if (value - t.packed >= t.k) {  // a position in a gap
      a.values[value] = 0.0f;
      a.chosen[value] = -1;
      continue;
    }
    const RandKDraw draw = a.draw_of(t);
    const int64_t at = t.offset + draw.chosen(t.strata(), value - t.packed, draw.rotation(t.count));
    float sum = a.grad[at];
    if (a.residual != nullptr) {
      sum += a.residual[at];
      a.residual[at] = 0.0f;
    }
    a.grad[at] = 0.0f;
    a.values[value] = sum;
    a.chosen[value] = at;
  }
}

// Sets the value of the stratum of a non-finite element to NaN. Non-finite elements are rare.
__device__ void show_non_finite(const GatherArgs& a, int64_t at) {
  const int index = find_tensor(a, &RandKTensor::offset, at);
  if (index < 0) return;
  const RandKTensor t = a.tensors[index];
  if (at >= t.offset + t.count) return;
  const RandKDraw draw = a.draw_of(t);
  const int64_t stratum = draw.stratum_of(t.strata(), at - t.offset, draw.rotation(t.count));
  a.values[t.packed + stratum] = bits_float(0x7fc00000u);
}

__global__ void __launch_bounds__(kVectorThreads)
    randk_keep_kernel(const __grid_constant__ GatherArgs a, const __grid_constant__ VectorSplit split) {
  wait_for_earlier_kernels();
  for_each_vector<kWidth>(split, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    float g[W], e[W], zero[W];
    load<W>(a.grad + i, g);
    if (a.residual != nullptr) load<W>(a.residual + i, e);
#pragma unroll
    for (int k = 0; k < W; ++k) {
      zero[k] = 0.0f;
      if (!is_finite(g[k])) {
        show_non_finite(a, i + k);
      } else if (a.residual != nullptr) {
        e[k] = fminf(fmaxf(g[k] + e[k], -FLT_MAX), FLT_MAX);
      }
    }
    if (a.residual != nullptr) store<W>(a.residual + i, e);
    store<W>(a.grad + i, zero);
  });
}

__global__ void __launch_bounds__(kVectorThreads)
    randk_scatter_kernel(const __grid_constant__ RandKScatter a) {
  wait_for_earlier_kernels();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t j = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; j < a.count; j += stride) {
    const int64_t at = a.chosen[j];
    if (at < 0) continue;
    a.grad[at] = a.values[j];
    if (a.lost != nullptr) a.residual[at] = a.lost[j];
  }
}

}  // namespace

void randk_gather(CudaStream stream, const RandKGather& op) {
  const GatherArgs a{op, op.table->device(), op.table->count(), op.table->values()};
  launch("randk_gather", randk_take_kernel,
         {.grid = dim3(grid_for(randk_take_kernel, a.value_count, kVectorThreads, kVectorThreads)),
          .block = dim3(kVectorThreads),
          .stream = stream},
         a);
  const VectorSplit split = Alignment(kWidth).with(op.grad).with(op.residual).split(op.count);
  launch_vectors<kWidth>("randk_gather", randk_keep_kernel, stream, split, a);
}

void randk_scatter(CudaStream stream, const RandKScatter& a) {
  launch("randk_scatter", randk_scatter_kernel,
         {.grid = dim3(grid_for(randk_scatter_kernel, a.count, kVectorThreads, kVectorThreads)),
          .block = dim3(kVectorThreads),
          .stream = stream},
         a);
}

}  // namespace gradwire::cuda
