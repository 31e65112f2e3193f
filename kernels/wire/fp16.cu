// FP16 to FP32 and back on CUDA: eight elements per thread and step.
#include "kernels/wire/fp16.h"

#include "kernels/cuda/vector.cuh"
#include "kernels/math/small_float.h"

namespace gradwire::cuda {
namespace {

constexpr int kWidth = 8;

struct WidenBody {
  const Fp16Widen& a;
  template <int W>
  __device__ __forceinline__ void at(int64_t i) const {
    uint16_t halves[W];
    float out[W];
    load_vector<W>(a.halves + i, halves);
#pragma unroll
    for (int k = 0; k < W; ++k) out[k] = fp16_to_float(halves[k]);
    store_vector<W>(a.out + i, out);
  }
};

struct NarrowBody {
  const Fp16Narrow& a;
  template <int W>
  __device__ __forceinline__ void at(int64_t i) const {
    float values[W];
    uint16_t out[W];
    load_vector<W>(a.values + i, values);
#pragma unroll
    for (int k = 0; k < W; ++k) out[k] = float_to_fp16(values[k]);
    store_vector<W>(a.out + i, out);
  }
};

__global__ void __launch_bounds__(kVectorThreads)
    fp16_widen_kernel(const __grid_constant__ Fp16Widen a, const __grid_constant__ VectorSplit split) {
  for_each_vector<kWidth>(split, WidenBody{a});
}

__global__ void __launch_bounds__(kVectorThreads)
    fp16_narrow_kernel(const __grid_constant__ Fp16Narrow a, const __grid_constant__ VectorSplit split) {
  for_each_vector<kWidth>(split, NarrowBody{a});
}

}  // namespace

void fp16_widen(CudaStream stream, const Fp16Widen& a) {
  const VectorSplit split = Alignment(kWidth).with(a.halves).with(a.out).split(a.count);
  launch_vectors<kWidth>("fp16_widen", fp16_widen_kernel, stream, split, a);
}

void fp16_narrow(CudaStream stream, const Fp16Narrow& a) {
  const VectorSplit split = Alignment(kWidth).with(a.values).with(a.out).split(a.count);
  launch_vectors<kWidth>("fp16_narrow", fp16_narrow_kernel, stream, split, a);
}

}  // namespace gradwire::cuda
