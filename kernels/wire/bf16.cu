// BF16 wire format on CUDA: four element-wise kernels, one launch each, eight elements per thread and step.
//
// Bytes per element: encode 14 with residual, 6 without; decode 6; decode_add 10; decode_add_encode 14 + 2
// per input. `out` costs 4 more. Limit: memory bandwidth. Alignment: any; all 16-byte accesses when the
// arrays share a head (kernels/cuda/vector.cuh). Deterministic: each element is computed by one thread from
// its own inputs.
#include "kernels/wire/bf16.h"

#include "kernels/cuda/vector.cuh"
#include "kernels/math/bf16.h"
#include "kernels/math/random.h"

namespace gradwire::cuda {
namespace {

constexpr int kWidth = 8;

// wire[k] = round(s[k]), for elements i .. i + W of the call.
template <Rounding kMode, int W>
__device__ __forceinline__ void round_all(const Bf16Rounding& rounding, uint64_t step, int64_t i,
                                          const float (&s)[W], uint16_t (&wire)[W]) {
  if constexpr (kMode == Rounding::nearest) {
#pragma unroll
    for (int k = 0; k < W; ++k) wire[k] = float_to_bf16_nearest(s[k]);
  } else {
    // Eight elements share a draw; they need a second one when they do not begin at a multiple of eight.
    uint64_t first = static_cast<uint64_t>(rounding.first_element + i);
    int shift = static_cast<int>(first & 7);
    Random4 draw = philox(rounding.seed, step, first >> 3);
    Random4 next = draw;
    if (W > 1 && shift != 0) next = philox(rounding.seed, step, (first >> 3) + 1);
#pragma unroll
    for (int k = 0; k < W; ++k) {
      bool beyond = shift + k > 7;
      wire[k] = float_to_bf16_stochastic(s[k], random16_of(beyond ? next : draw, (shift + k) & 7));
    }
  }
}

// The end of an encode: writes wire, residual and out for the sums s.
template <Rounding kMode, int W>
__device__ __forceinline__ void finish(int64_t i, const float (&s)[W], const Bf16Rounding& rounding,
                                       uint64_t step, uint16_t* wire_out, float* residual, float* out,
                                       float out_scale) {
  uint16_t wire[W];
  round_all<kMode, W>(rounding, step, i, s, wire);
  store<W>(wire_out + i, wire);
  if (residual != nullptr) {
    float left[W];
#pragma unroll
    for (int k = 0; k < W; ++k) left[k] = is_finite(s[k]) ? s[k] - bf16_to_float(wire[k]) : 0.0f;
    store<W>(residual + i, left);
  }
  if (out != nullptr) {
    float decoded[W];
#pragma unroll
    for (int k = 0; k < W; ++k) decoded[k] = out_scale * bf16_to_float(wire[k]);
    store<W>(out + i, decoded);
  }
}

template <int W>
__device__ __forceinline__ void load_wire(const uint16_t* wire, float (&x)[W]) {
  uint16_t bits[W];
  load<W>(wire, bits);
#pragma unroll
  for (int k = 0; k < W; ++k) x[k] = bf16_to_float(bits[k]);
}

template <int W>
__device__ __forceinline__ void load_own(const float* grad, const float* residual, int64_t i,
                                         float (&own)[W]) {
  load<W>(grad + i, own);
  if (residual != nullptr) {
    float kept[W];
    load<W>(residual + i, kept);
    add<W>(kept, own);
  }
}

template <Rounding kMode>
struct EncodeBody {
  const Bf16Encode& a;
  uint64_t step;
  template <int W>
  __device__ __forceinline__ void at(int64_t i) const {
    float s[W];
    load_own<W>(a.grad, a.residual, i, s);
    finish<kMode, W>(i, s, a.rounding, step, a.wire, a.residual, a.out, a.out_scale);
  }
};

struct DecodeBody {
  const Bf16Decode& a;
  template <int W>
  __device__ __forceinline__ void at(int64_t i) const {
    float out[W];
    load_wire<W>(a.wire + i, out);
#pragma unroll
    for (int k = 0; k < W; ++k) out[k] *= a.scale;
    store<W>(a.out + i, out);
  }
};

struct DecodeAddBody {
  const Bf16DecodeAdd& a;
  template <int W>
  __device__ __forceinline__ void at(int64_t i) const {
    float x[W], acc[W];
    load_wire<W>(a.wire + i, x);
    load<W>(a.acc + i, acc);
    add<W>(x, acc);
    store<W>(a.acc + i, acc);
  }
};

template <Rounding kMode>
struct HopBody {
  const Bf16DecodeAddEncode& a;
  uint64_t step;

  template <int W>
  __device__ __forceinline__ void at(int64_t i) const {
    float own[W], s[W];
    load_own<W>(a.grad, a.residual, i, own);
#pragma unroll
    for (int k = 0; k < W; ++k) s[k] = -0.0f;  // adding to it changes nothing, not even a zero's sign
    // The next input is on its way while this one is added. Unrolled further, the sums would leave the
    // registers.
    float next[W];
    if (a.num_inputs > 0) load_wire<W>(a.inputs[0] + i, next);
#pragma unroll 1
    for (int input = 0; input < a.num_inputs; ++input) {
      float x[W];
#pragma unroll
      for (int k = 0; k < W; ++k) x[k] = next[k];
      if (input + 1 < a.num_inputs) load_wire<W>(a.inputs[input + 1] + i, next);
      if (input == a.own_position) add<W>(own, s);
      add<W>(x, s);
    }
    if (a.own_position == a.num_inputs) add<W>(own, s);
    finish<kMode, W>(i, s, a.rounding, step, a.wire, a.residual, a.out, a.out_scale);
  }
};

__device__ __forceinline__ uint64_t step_of(const Bf16Rounding& rounding) {
  return rounding.step != nullptr ? *rounding.step : 0;
}

template <Rounding kMode>
__global__ void __launch_bounds__(kVectorThreads)
    bf16_encode_kernel(const __grid_constant__ Bf16Encode a, const __grid_constant__ VectorSplit split) {
  for_each_vector<kWidth>(split, EncodeBody<kMode>{a, step_of(a.rounding)});
}

__global__ void __launch_bounds__(kVectorThreads)
    bf16_decode_kernel(const __grid_constant__ Bf16Decode a, const __grid_constant__ VectorSplit split) {
  for_each_vector<kWidth>(split, DecodeBody{a});
}

__global__ void __launch_bounds__(kVectorThreads)
    bf16_decode_add_kernel(const __grid_constant__ Bf16DecodeAdd a,
                           const __grid_constant__ VectorSplit split) {
  for_each_vector<kWidth>(split, DecodeAddBody{a});
}

template <Rounding kMode>
__global__ void __launch_bounds__(kVectorThreads, 4)
    bf16_hop_kernel(const __grid_constant__ Bf16DecodeAddEncode a,
                    const __grid_constant__ VectorSplit split) {
  for_each_vector<kWidth>(split, HopBody<kMode>{a, step_of(a.rounding)});
}

LaunchConfig config_for(const VectorSplit& split, CudaStream stream) {
  return {.grid = dim3(vector_grid<kWidth>(split)), .block = dim3(kVectorThreads), .stream = stream};
}

}  // namespace

void bf16_encode(CudaStream stream, const Bf16Encode& a) {
  auto split = Alignment(kWidth).with(a.grad).with(a.residual).with(a.wire).with(a.out).split(a.count);
  auto* kernel = a.rounding.mode == Rounding::nearest ? bf16_encode_kernel<Rounding::nearest>
                                                      : bf16_encode_kernel<Rounding::stochastic>;
  launch("bf16_encode", kernel, config_for(split, stream), a, split);
}

void bf16_decode(CudaStream stream, const Bf16Decode& a) {
  auto split = Alignment(kWidth).with(a.wire).with(a.out).split(a.count);
  launch("bf16_decode", bf16_decode_kernel, config_for(split, stream), a, split);
}

void bf16_decode_add(CudaStream stream, const Bf16DecodeAdd& a) {
  auto split = Alignment(kWidth).with(a.wire).with(a.acc).split(a.count);
  launch("bf16_decode_add", bf16_decode_add_kernel, config_for(split, stream), a, split);
}

void bf16_decode_add_encode(CudaStream stream, const Bf16DecodeAddEncode& a) {
  auto alignment = Alignment(kWidth).with(a.grad).with(a.residual).with(a.wire).with(a.out);
  for (int k = 0; k < a.num_inputs; ++k) alignment.with(a.inputs[k]);
  auto split = alignment.split(a.count);
  auto* kernel = a.rounding.mode == Rounding::nearest ? bf16_hop_kernel<Rounding::nearest>
                                                      : bf16_hop_kernel<Rounding::stochastic>;
  launch("bf16_decode_add_encode", kernel, config_for(split, stream), a, split);
}

}  // namespace gradwire::cuda
