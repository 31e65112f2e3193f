// Block-scaled FP8 wire format on CUDA: a warp per block of 128 values, four consecutive values per lane, so
// that floats move in 16-byte pieces and codes in 4-byte ones, both whole cache lines per warp. The block's
// largest magnitude is found by shuffles; nothing is staged in shared memory.
//
// Bytes per element: encode 13 with residual, 5 without; decode 5; decode_add 9; hop 13 + 1 per input. Limit:
// memory bandwidth. Alignment: any for floats, 16 bytes fast. Deterministic: a value depends on its own block
// only.
#include <initializer_list>

#include "kernels/cuda/vector.cuh"
#include "kernels/math/random.h"
#include "kernels/wire/fp8.h"
#include "runtime/launch.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kPerLane = kFp8Block / 32;
static_assert(kPerLane == 4);

// A lane's four values of one block; `valid` of them exist.
struct Lane {
  int64_t begin;  // index of the first
  int valid;      // 0..4
};

__device__ __forceinline__ Lane lane_of(int64_t block, int64_t count) {
  int64_t begin = block * kFp8Block + static_cast<int64_t>(threadIdx.x % 32) * kPerLane;
  int64_t left = count - begin;
  return {begin, left >= kPerLane ? kPerLane : (left > 0 ? static_cast<int>(left) : 0)};
}

// kWhole: all 128 values of the block exist and floats are 16-byte aligned. Blocks of the two kinds are done
// in loops of their own; side by side, the compiler merges both ways into scalar stores.
template <bool kWhole>
__device__ __forceinline__ void load_floats(const float* from, const Lane& lane, float (&x)[kPerLane]) {
  if constexpr (kWhole) {
    load<kPerLane>(from + lane.begin, x);
  } else {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) x[k] = k < lane.valid ? from[lane.begin + k] : 0.0f;
  }
}

template <bool kWhole>
__device__ __forceinline__ void store_floats(float* to, const Lane& lane, const float (&x)[kPerLane]) {
  if constexpr (kWhole) {
    // The plain assignment of a float4 comes out as four stores here; this comes out as one.
    __stwb(reinterpret_cast<float4*>(to + lane.begin), make_float4(x[0], x[1], x[2], x[3]));
  } else {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      if (k < lane.valid) to[lane.begin + k] = x[k];
    }
  }
}

// Wires are 16-byte aligned and padded to 16 codes, so a lane with any value may read its four codes as one
// word.
__device__ __forceinline__ void load_wire(const uint8_t* wire, int64_t count, int64_t block, const Lane& lane,
                                          float (&x)[kPerLane]) {
  const float scale = fp8_scale(wire[fp8_scales_offset(count) + block]);
  const uint32_t word = lane.valid > 0 ? *reinterpret_cast<const uint32_t*>(wire + lane.begin) : 0u;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) x[k] = scale * e4m3_to_float(static_cast<uint8_t>(word >> (8 * k)));
}

template <Rounding kMode, bool kWhole>
__device__ __forceinline__ void hop_block(const Fp8DecodeAddEncode& a, int64_t block, uint64_t step) {
  const Lane lane = lane_of(block, a.count);
  float own[kPerLane], s[kPerLane];
  load_floats<kWhole>(a.grad, lane, own);
  if (a.residual != nullptr) {
    float kept[kPerLane];
    load_floats<kWhole>(a.residual, lane, kept);
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) own[k] += kept[k];
  }
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) s[k] = -0.0f;  // adding to it changes nothing, not even a zero's sign
#pragma unroll 1
  for (int input = 0; input < a.num_inputs; ++input) {
    float x[kPerLane];
    load_wire(a.inputs[input], a.count, block, lane, x);
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      if (input == a.own_position) s[k] += own[k];
      s[k] += x[k];
    }
  }
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    if (a.own_position == a.num_inputs) s[k] += own[k];
    const uint32_t bits = k < lane.valid ? finite_magnitude_bits(s[k]) : 0u;
    largest = bits > largest ? bits : largest;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, largest, offset);
    largest = other > largest ? other : largest;
  }
  const uint8_t scale = fp8_scale_byte(largest);
  if (threadIdx.x % 32 == 0) a.wire[fp8_scales_offset(a.count) + block] = scale;

  uint32_t word = 0;
  float sent[kPerLane], left[kPerLane];
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const float scaled = s[k] * fp8_inverse_scale(scale);
    uint8_t code;
    if constexpr (kMode == Rounding::nearest) {
      code = float_to_e4m3_nearest(scaled);
    } else {
      const uint64_t element = static_cast<uint64_t>(a.rounding.first_element + lane.begin + k);
      code = float_to_e4m3_stochastic(scaled, random16(a.rounding.seed, step, element));
    }
    word |= static_cast<uint32_t>(code) << (8 * k);
    sent[k] = fp8_scale(scale) * e4m3_to_float(code);
    left[k] = is_finite(s[k]) ? s[k] - sent[k] : 0.0f;
    sent[k] *= a.out_scale;
  }
  if (kWhole || lane.valid == kPerLane) {
    *reinterpret_cast<uint32_t*>(a.wire + lane.begin) = word;
  } else {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      if (k < lane.valid) a.wire[lane.begin + k] = static_cast<uint8_t>(word >> (8 * k));
    }
  }
  if (a.residual != nullptr) store_floats<kWhole>(a.residual, lane, left);
  if (a.out != nullptr) store_floats<kWhole>(a.out, lane, sent);
}

template <Rounding kMode, bool kAligned>
__global__ void __launch_bounds__(kThreads) fp8_hop_kernel(const __grid_constant__ Fp8DecodeAddEncode a) {
  const uint64_t step = a.rounding.step != nullptr ? *a.rounding.step : 0;
  const int64_t all = (a.count + kFp8Block - 1) / kFp8Block, whole = kAligned ? a.count / kFp8Block : 0;
  const int64_t stride = int64_t{gridDim.x} * kWarps;
  int64_t block = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  for (; block < whole; block += stride) hop_block<kMode, true>(a, block, step);
  for (; block < all; block += stride) hop_block<kMode, false>(a, block, step);
}

template <bool kAdd, bool kWhole>
__device__ __forceinline__ void decode_block(const uint8_t* wire, float* out, float out_scale, int64_t count,
                                             int64_t block) {
  const Lane lane = lane_of(block, count);
  float x[kPerLane];
  load_wire(wire, count, block, lane, x);
  if constexpr (kAdd) {
    float acc[kPerLane];
    load_floats<kWhole>(out, lane, acc);
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) x[k] = acc[k] + x[k];
  } else {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) x[k] *= out_scale;
  }
  store_floats<kWhole>(out, lane, x);
}

template <bool kAdd, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    fp8_decode_kernel(const uint8_t* wire, float* out, float out_scale, int64_t count) {
  const int64_t all = (count + kFp8Block - 1) / kFp8Block, whole = kAligned ? count / kFp8Block : 0;
  const int64_t stride = int64_t{gridDim.x} * kWarps;
  int64_t block = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  for (; block < whole; block += stride) decode_block<kAdd, true>(wire, out, out_scale, count, block);
  for (; block < all; block += stride) decode_block<kAdd, false>(wire, out, out_scale, count, block);
}

LaunchConfig config_for(int64_t count, CudaStream stream) {
  return {.grid = dim3(grid_for(count, kWarps * kFp8Block)), .block = dim3(kThreads), .stream = stream};
}

bool aligned(std::initializer_list<const float*> pointers) {
  for (const float* p : pointers) {
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return false;
  }
  return true;
}

}  // namespace

void fp8_decode_add_encode(CudaStream stream, const Fp8DecodeAddEncode& a) {
  const bool fast = aligned({a.grad, a.residual, a.out});
  auto* kernel =
      a.rounding.mode == Rounding::nearest
          ? (fast ? fp8_hop_kernel<Rounding::nearest, true> : fp8_hop_kernel<Rounding::nearest, false>)
          : (fast ? fp8_hop_kernel<Rounding::stochastic, true> : fp8_hop_kernel<Rounding::stochastic, false>);
  launch("fp8_decode_add_encode", kernel, config_for(a.count, stream), a);
}

// An encode is a hop without inputs: the loop over them costs one compare.
void fp8_encode(CudaStream stream, const Fp8Encode& a) {
  Fp8DecodeAddEncode hop;
  hop.grad = a.grad;
  hop.residual = a.residual;
  hop.wire = a.wire;
  hop.out = a.out;
  hop.out_scale = a.out_scale;
  hop.count = a.count;
  hop.rounding = a.rounding;
  fp8_decode_add_encode(stream, hop);
}

void fp8_decode(CudaStream stream, const Fp8Decode& a) {
  auto* kernel = aligned({a.out}) ? fp8_decode_kernel<false, true> : fp8_decode_kernel<false, false>;
  launch("fp8_decode", kernel, config_for(a.count, stream), a.wire, a.out, a.scale, a.count);
}

void fp8_decode_add(CudaStream stream, const Fp8DecodeAdd& a) {
  auto* kernel = aligned({a.acc}) ? fp8_decode_kernel<true, true> : fp8_decode_kernel<true, false>;
  launch("fp8_decode_add", kernel, config_for(a.count, stream), a.wire, a.acc, 1.0f, a.count);
}

}  // namespace gradwire::cuda
