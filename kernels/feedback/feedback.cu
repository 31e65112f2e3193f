// Error feedback's passes on CUDA (see kernels/feedback/feedback.h): 16-byte accesses where the arrays share
// an alignment.
#include "kernels/cuda/vector.cuh"
#include "kernels/feedback/feedback.h"
#include "kernels/math/bf16.h"

namespace gradwire::cuda {
namespace {

constexpr int kWidth = 4;

struct DifferenceBody {
  const Ef21Difference& a;

  template <int W>
  __device__ __forceinline__ void at(int64_t i) const {
    float g[W], d[W], h[W], rest[W], zero[W];
    load<W>(a.grad + i, g);
    load<W>(a.residual + i, d);
    load<W>(a.estimate + i, h);
#pragma unroll
    for (int k = 0; k < W; ++k) {
      const bool finite = is_finite(g[k]);
      rest[k] = finite ? g[k] - a.unit * h[k] : d[k];
      g[k] = finite ? rest[k] - d[k] : g[k];
      zero[k] = 0.0f;
    }
    store_wide<W>(a.kept + i, rest);
    store_wide<W>(a.grad + i, g);
    store_wide<W>(a.residual + i, zero);
  }
};

struct UpdateBody {
  const Ef21Update& a;

  template <int W>
  __device__ __forceinline__ void at(int64_t i) const {
    float mean[W], e[W], h[W], kept[W];
    load<W>(a.grad + i, mean);
    load<W>(a.residual + i, e);
    load<W>(a.estimate + i, h);
    load<W>(a.kept + i, kept);
#pragma unroll
    for (int k = 0; k < W; ++k) {
      const float next = h[k] + mean[k];
      const float deviation = kept[k] - e[k] - a.unit * mean[k];
      const bool finite = is_finite(next);
      e[k] = finite && is_finite(deviation) ? deviation : 0.0f;
      h[k] = finite ? next : h[k];
      mean[k] = next;
    }
    store_wide<W>(a.residual + i, e);
    store_wide<W>(a.estimate + i, h);
    store_wide<W>(a.grad + i, mean);
  }
};

struct AddBody {
  const MomentumAdd& a;

  template <int W>
  __device__ __forceinline__ void at(int64_t i) const {
    float g[W], u[W];
    load<W>(a.grad + i, g);
    load<W>(a.momentum + i, u);
#pragma unroll
    for (int k = 0; k < W; ++k) {
      const float next = a.factor * u[k] + g[k];
      const bool finite = is_finite(g[k]);
      u[k] = !finite ? u[k] : is_finite(next) ? next : 0.0f;
      g[k] = finite ? next : g[k];
    }
    store_wide<W>(a.momentum + i, u);
    store_wide<W>(a.grad + i, g);
  }
};

struct MaskBody {
  const MomentumMask& a;

  template <int W>
  __device__ __forceinline__ void at(int64_t i) const {
    float g[W], u[W];
    load<W>(a.grad + i, g);
    load<W>(a.momentum + i, u);
#pragma unroll
    for (int k = 0; k < W; ++k) u[k] = g[k] != 0.0f ? 0.0f : u[k];
    store_wide<W>(a.momentum + i, u);
  }
};

__global__ void __launch_bounds__(kVectorThreads)
    ef21_difference_kernel(const __grid_constant__ Ef21Difference a,
                           const __grid_constant__ VectorSplit split) {
  for_each_vector<kWidth>(split, DifferenceBody{a});
}

__global__ void __launch_bounds__(kVectorThreads)
    ef21_update_kernel(const __grid_constant__ Ef21Update a, const __grid_constant__ VectorSplit split) {
  for_each_vector<kWidth>(split, UpdateBody{a});
}

__global__ void __launch_bounds__(kVectorThreads)
    momentum_add_kernel(const __grid_constant__ MomentumAdd a, const __grid_constant__ VectorSplit split) {
  for_each_vector<kWidth>(split, AddBody{a});
}

__global__ void __launch_bounds__(kVectorThreads)
    momentum_mask_kernel(const __grid_constant__ MomentumMask a, const __grid_constant__ VectorSplit split) {
  for_each_vector<kWidth>(split, MaskBody{a});
}

}  // namespace

void ef21_difference(CudaStream stream, const Ef21Difference& a) {
  const VectorSplit split =
      Alignment(kWidth).with(a.grad).with(a.residual).with(a.estimate).with(a.kept).split(a.count);
  launch_vectors<kWidth>("ef21_difference", ef21_difference_kernel, stream, split, a);
}

void ef21_update(CudaStream stream, const Ef21Update& a) {
  const VectorSplit split =
      Alignment(kWidth).with(a.grad).with(a.residual).with(a.estimate).with(a.kept).split(a.count);
  launch_vectors<kWidth>("ef21_update", ef21_update_kernel, stream, split, a);
}

void momentum_add(CudaStream stream, const MomentumAdd& a) {
  launch_vectors<kWidth>("momentum_add", momentum_add_kernel, stream,
                         Alignment(kWidth).with(a.grad).with(a.momentum).split(a.count), a);
}

void momentum_mask(CudaStream stream, const MomentumMask& a) {
  launch_vectors<kWidth>("momentum_mask", momentum_mask_kernel, stream,
                         Alignment(kWidth).with(a.grad).with(a.momentum).split(a.count), a);
}

}  // namespace gradwire::cuda
