// SGD and AdamW steps over one flat buffer, in one launch; scalars are read from device memory.
//
// Bytes per element: SGD 20 with momentum, 12 without; AdamW 28; 2 more for a copy in BF16. Accesses are 16
// bytes wide where all buffers can be aligned together. Limit: memory bandwidth. Deterministic.
#include "kernels/cuda/vector.cuh"
#include "kernels/passes/passes.h"

namespace gradwire::cuda {
namespace {

struct Sgd {
  SgdStep a;
  float lr;

  template <int W>
  __device__ __forceinline__ void at(int64_t i) const {
    float w[W], g[W];
    load<W>(a.params + i, w);
    load<W>(a.grads + i, g);
#pragma unroll
    for (int k = 0; k < W; ++k) g[k] = fmaf(a.weight_decay, w[k], g[k]);
    if (a.velocity != nullptr) {
      float v[W];
      load<W>(a.velocity + i, v);
#pragma unroll
      for (int k = 0; k < W; ++k) g[k] = fmaf(a.momentum, v[k], g[k]);
      store<W>(a.velocity + i, g);
    }
#pragma unroll
    for (int k = 0; k < W; ++k) w[k] = fmaf(-lr, g[k], w[k]);
    store<W>(a.params + i, w);
    if (a.rounded != nullptr) store<W>(a.rounded + i, w);
  }
};

struct AdamW {
  AdamWStep a;
  float keep, step, root_correction;

  template <int W>
  __device__ __forceinline__ void at(int64_t i) const {
    float w[W], g[W], m[W], v[W];
    load<W>(a.params + i, w);
    load<W>(a.grads + i, g);
    load<W>(a.m + i, m);
    load<W>(a.v + i, v);
#pragma unroll
    for (int k = 0; k < W; ++k) {
      // fmaf() is explicit, because nvcc otherwise contracts different products for W = 1 and W = 4.
      m[k] = fmaf(a.beta1, m[k], (1.0f - a.beta1) * g[k]);
      v[k] = fmaf(a.beta2, v[k], (1.0f - a.beta2) * g[k] * g[k]);
      w[k] = fmaf(keep, w[k], -(step * m[k] / fmaf(sqrtf(v[k]), root_correction, a.eps)));
    }
    store<W>(a.m + i, m);
    store<W>(a.v + i, v);
    store<W>(a.params + i, w);
    if (a.rounded != nullptr) store<W>(a.rounded + i, w);
  }
};

__global__ void __launch_bounds__(kVectorThreads) sgd_step_kernel(SgdStep a, VectorSplit split) {
  for_each_vector<4>(split, Sgd{a, a.scalars->lr});
}

__global__ void __launch_bounds__(kVectorThreads) adamw_step_kernel(AdamWStep a, VectorSplit split) {
  const OptimizerScalars s = *a.scalars;
  for_each_vector<4>(
      split, AdamW{a, 1.0f - s.lr * a.weight_decay, s.lr / s.correction1, 1.0f / sqrtf(s.correction2)});
}

}  // namespace

void sgd_step(CudaStream stream, const SgdStep& a) {
  const auto split =
      Alignment(4).with(a.params).with(a.grads).with(a.velocity).with(a.rounded).split(a.count);
  launch_vectors<4>("sgd_step", sgd_step_kernel, stream, split, a);
}

void adamw_step(CudaStream stream, const AdamWStep& a) {
  const auto split =
      Alignment(4).with(a.params).with(a.grads).with(a.m).with(a.v).with(a.rounded).split(a.count);
  launch_vectors<4>("adamw_step", adamw_step_kernel, stream, split, a);
}

}  // namespace gradwire::cuda
