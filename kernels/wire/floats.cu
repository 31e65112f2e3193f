// FP32 wire format on CUDA: a sum of many arrays in a fixed order, in one pass.
//
// Bytes per element: 8 + 4 per input. Limit: memory bandwidth. Alignment: any; 16-byte accesses when the
// arrays share a head (kernels/cuda/vector.cuh). Deterministic: the additions are in the contract's order.
#include "kernels/wire/floats.h"

#include "kernels/cuda/vector.cuh"
#include "kernels/math/random.h"
#include "kernels/math/small_float.h"

namespace gradwire::cuda {
namespace {

constexpr int kFp32Width = 4;

__global__ void __launch_bounds__(kVectorThreads)
    fp32_reduce_kernel(const __grid_constant__ Reduce a, const __grid_constant__ VectorSplit split) {
  wait_for_earlier_kernels();
  for_each_vector<kFp32Width>(split, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
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
  });
}

}  // namespace

void fp32_reduce(CudaStream stream, const Reduce& a) {
  auto alignment = Alignment(kFp32Width).with(a.own).with(a.out);
  for (int k = 0; k < a.num_inputs; ++k) alignment.with(a.inputs[k]);
  auto split = alignment.split(a.count);
  launch_vectors<kFp32Width>("fp32_reduce", fp32_reduce_kernel, stream, split, a);
}

// BF16 wire format on CUDA: two element-wise kernels, eight elements per thread and step.
//
// Bytes per element: as in kernels/wire/format.h, with w = 2. Limit: memory bandwidth. Alignment: any;
// 16-byte accesses to floats when the arrays share a head (kernels/cuda/vector.cuh). Deterministic: one
// thread computes each element, from that element's inputs only.

namespace {

constexpr int kWidth = 8;

// Stores round(s[k]) in wire[k] for the vector at element i of the call.
template <Coding kCoding, int W>
__device__ __forceinline__ void round_all(const WireRounding& rounding, uint64_t step, int64_t i,
                                          const float (&s)[W], uint16_t (&wire)[W]) {
  if constexpr (kCoding == Coding::nearest) {
#pragma unroll
    for (int k = 0; k < W; ++k) wire[k] = float_to_bf16_nearest(s[k]);
  } else {
    const auto first = static_cast<uint64_t>(rounding.first_element + i);
    const RoundingBits random(rounding.seed, step, first);
#pragma unroll
    for (int k = 0; k < W; ++k) wire[k] = float_to_bf16_stochastic(s[k], random(first + element_of<W>(k)));
  }
}

template <int W>
__device__ __forceinline__ void load_wire(const void* from, int64_t i, float (&x)[W]) {
  uint16_t bits[W];
  load_vector<W>(static_cast<const uint16_t*>(from) + i, bits);
#pragma unroll
  for (int k = 0; k < W; ++k) x[k] = bf16_to_float(bits[k]);
}

// Replaces s, this rank's part, with the sum of all parts.
template <int W>
__device__ __forceinline__ void sum_all(const ReduceEncode& a, int64_t i, float (&s)[W]) {
  float own[W];
#pragma unroll
  for (int k = 0; k < W; ++k) {
    own[k] = s[k];
    s[k] = -0.0f;  // the additive identity, also for -0
  }
  // Loads the next input while adding this one. Unrolling further spills the sums.
  float next[W];
  if (a.num_inputs > 0) load_wire<W>(a.inputs[0], i, next);
#pragma unroll 1
  for (int input = 0; input < a.num_inputs; ++input) {
    float x[W];
#pragma unroll
    for (int k = 0; k < W; ++k) x[k] = next[k];
    if (input + 1 < a.num_inputs) load_wire<W>(a.inputs[input + 1], i, next);
    if (input == a.own_position) add<W>(a.own_scale, own, s);
    add<W>(a.input_scale(input), x, s);
  }
  if (a.own_position == a.num_inputs) add<W>(a.own_scale, own, s);
}

// Writes `wire`, `residual` and `out`. kSum: S has inputs, or the scale of S is not 1.
template <Coding kCoding, bool kSum, int W>
__device__ __forceinline__ void finish(const ReduceEncode& a, uint64_t step, int64_t i, const float (&s)[W]) {
  float sent[W], left[W];
  if constexpr (kCoding == Coding::none) {
#pragma unroll
    for (int k = 0; k < W; ++k) sent[k] = s[k], left[k] = 0.0f;
  } else {
    uint16_t wire[W];
    round_all<kCoding, W>(a.rounding, step, i, s, wire);
    store_vector<W>(static_cast<uint16_t*>(a.wire) + i, wire);
#pragma unroll
    for (int k = 0; k < W; ++k) {
      sent[k] = bf16_to_float(wire[k]);
      left[k] = to_residual(s[k] - sent[k], kSum ? residual_unit(a) : 1.0f);
    }
  }
  if (a.residual != nullptr) store_vector<W>(a.residual + i, left);
  if (a.out != nullptr) {
#pragma unroll
    for (int k = 0; k < W; ++k) sent[k] *= a.out_scale;
    store_vector<W>(a.out + i, sent);
  }
}

// Encodes all vectors of the call. With inputs, four blocks share a multiprocessor, which hides the latency
// of consecutive inputs.
template <Coding kCoding, bool kSum>
__global__ void __launch_bounds__(kVectorThreads, kSum ? 4 : 1)
    bf16_reduce_encode_kernel(const __grid_constant__ ReduceEncode a,
                              const __grid_constant__ VectorSplit split) {
  wait_for_earlier_kernels();
  const uint64_t step = step_of(a.rounding);
  for_each_vector<kWidth>(split, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    float s[W];
    load_vector<W>(a.own + i, s);
    if (a.residual != nullptr) {
      float kept[W];
      load_vector<W>(a.residual + i, kept);
      add<W>(kSum ? a.residual_scale : 1.0f, kept, s);
    }
    if (kSum) sum_all<W>(a, i, s);
    finish<kCoding, kSum, W>(a, step, i, s);
  });
}

__global__ void __launch_bounds__(kVectorThreads)
    bf16_decode_kernel(const __grid_constant__ Decode a, const __grid_constant__ VectorSplit split) {
  wait_for_earlier_kernels();
  for_each_vector<kWidth>(split, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    float out[W];
    load_wire<W>(a.wire, i, out);
    forget_not_finite<W>(out, a.residual == nullptr ? nullptr : a.residual + i);
#pragma unroll
    for (int k = 0; k < W; ++k) out[k] *= a.scale;
    store_vector<W>(a.out + i, out);
  });
}

template <bool kSum>
auto* kernel_for(Coding coding) {
  return coding == Coding::none      ? bf16_reduce_encode_kernel<Coding::none, kSum>
         : coding == Coding::nearest ? bf16_reduce_encode_kernel<Coding::nearest, kSum>
                                     : bf16_reduce_encode_kernel<Coding::stochastic, kSum>;
}

const uint16_t* wire_of(const void* data) {
  return static_cast<const uint16_t*>(data);
}

}  // namespace

void bf16_reduce_encode(CudaStream stream, const ReduceEncode& a) {
  auto alignment = Alignment(kWidth).with(a.own).with(a.residual).with(wire_of(a.wire)).with(a.out);
  for (int k = 0; k < a.num_inputs; ++k) alignment.with(wire_of(a.inputs[k]));
  auto split = alignment.split(a.count);
  const bool sum = a.num_inputs > 0 || a.own_scale * a.residual_scale != 1.0f;
  auto* kernel = sum ? kernel_for<true>(coding_of(a)) : kernel_for<false>(coding_of(a));
  launch_vectors<kWidth>("bf16_reduce_encode", kernel, stream, split, a);
}

void bf16_decode(CudaStream stream, const Decode& a) {
  auto split = Alignment(kWidth).with(wire_of(a.wire)).with(a.out).split(a.count);
  launch_vectors<kWidth>("bf16_decode", bf16_decode_kernel, stream, split, a);
}

}  // namespace gradwire::cuda
