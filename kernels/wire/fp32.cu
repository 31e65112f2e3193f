// FP32 wire format on CUDA: a sum of many arrays in a fixed order, in one pass.
//
// Bytes per element: 8 + 4 per input. Limit: memory bandwidth. Alignment: any; 16-byte accesses when the
// arrays share a head (kernels/cuda/vector.cuh). Deterministic: the additions are in the contract's order.
#include "kernels/wire/fp32.h"

#include "kernels/cuda/vector.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kFp32Width = 4;

struct ReduceBody {
  const Reduce& a;

  template <int W>
  __device__ __forceinline__ void at(int64_t i) const {
    float own[W], s[W];
    load<W>(a.own + i, own);
#pragma unroll
    for (int k = 0; k < W; ++k) s[k] = -0.0f;  // the additive identity, also for -0
    for (int input = 0; input < a.num_inputs; ++input) {
      float x[W];
      load<W>(a.inputs[input] + i, x);
      if (input == a.own_position) add<W>(a.own_scale, own, s);
      add<W>(a.input_scale(input), x, s);
    }
    if (a.own_position == a.num_inputs) add<W>(a.own_scale, own, s);
#pragma unroll
    for (int k = 0; k < W; ++k) s[k] *= a.scale;
    store<W>(a.out + i, s);
  }
};

__global__ void __launch_bounds__(kVectorThreads)
    fp32_reduce_kernel(const __grid_constant__ Reduce a, const __grid_constant__ VectorSplit split) {
  for_each_vector<kFp32Width>(split, ReduceBody{a});
}

}  // namespace

void fp32_reduce(CudaStream stream, const Reduce& a) {
  auto alignment = Alignment(kFp32Width).with(a.own).with(a.out);
  for (int k = 0; k < a.num_inputs; ++k) alignment.with(a.inputs[k]);
  auto split = alignment.split(a.count);
  launch_vectors<kFp32Width>("fp32_reduce", fp32_reduce_kernel, stream, split, a);
}

}  // namespace gradwire::cuda
