// Block-scaled FP8 wire format on CUDA: a warp per block of 128 values, four consecutive values per lane, so
// that floats move in 16-byte pieces and codes in 4-byte pieces, each a whole number of cache lines per warp.
// Shuffles find the block's largest magnitude; shared memory is not used.
//
// Bytes per element: as in kernels/wire/format.h, with w = 1.008. Limit: memory bandwidth. Alignment: any for
// floats, 16-byte alignment is fast. Deterministic: a value depends on its block only.
#include "kernels/wire/fp8.h"

#include <type_traits>

#include "kernels/cuda/vector.cuh"
#include "kernels/math/random.h"

namespace gradwire::cuda {
namespace {

constexpr int kThreads = kVectorThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kPerLane = kFp8Block / 32;
static_assert(kPerLane == 4);

// A lane's four values of one block; `valid` of them exist.
struct Lane {
  int64_t begin;  // index of the lane's first value
  int valid;      // number of the lane's values that exist, 0..4
};

__device__ __forceinline__ Lane lane_of(int64_t block, int64_t count) {
  int64_t begin = block * kFp8Block + static_cast<int64_t>(threadIdx.x % 32) * kPerLane;
  int64_t left = count - begin;
  return {begin, left >= kPerLane ? kPerLane : (left > 0 ? static_cast<int>(left) : 0)};
}

// Load and store a lane's floats. kWhole: all 128 values of the block exist and floats are 16-byte aligned.
// The two kinds of blocks have separate loops; in one loop the compiler merges both into scalar stores.
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
    // __stwb() compiles to one store; assigning a float4 would compile to four stores.
    __stwb(reinterpret_cast<float4*>(to + lane.begin), make_float4(x[0], x[1], x[2], x[3]));
  } else {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      if (k < lane.valid) to[lane.begin + k] = x[k];
    }
  }
}

// Decodes a lane's values of a block. Encoded arrays are 16-byte aligned and padded to 16 codes, so a lane
// with any value may read its four codes as one word.
__device__ __forceinline__ void load_wire(const void* input, int64_t count, int64_t block, const Lane& lane,
                                          float (&x)[kPerLane]) {
  const auto* wire = static_cast<const uint8_t*>(input);
  const float scale = fp8_scale(wire[fp8_scales_offset(count) + block]);
  const uint32_t word = lane.valid > 0 ? *reinterpret_cast<const uint32_t*>(wire + lane.begin) : 0u;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) x[k] = scale * e4m3_to_float((word >> (8 * k)) & 0xffu);
}

// Sums a lane's values as in format.h.
template <bool kWhole>
__device__ __forceinline__ void sum_block(const ReduceEncode& a, int64_t block, const Lane& lane,
                                          float (&s)[kPerLane]) {
  float own[kPerLane];
  load_floats<kWhole>(a.own, lane, own);
  if (a.residual != nullptr) {
    float kept[kPerLane];
    load_floats<kWhole>(a.residual, lane, kept);
    add<kPerLane>(a.residual_scale, kept, own);
  }
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) s[k] = -0.0f;  // the additive identity, also for -0
#pragma unroll 1
  for (int input = 0; input < a.num_inputs; ++input) {
    float x[kPerLane];
    load_wire(a.inputs[input], a.count, block, lane, x);
    if (input == a.own_position) add<kPerLane>(a.own_scale, own, s);
    add<kPerLane>(a.input_scale(input), x, s);
  }
  if (a.own_position == a.num_inputs) add<kPerLane>(a.own_scale, own, s);
}

template <Coding kCoding, bool kWhole>
__device__ __forceinline__ void reduce_encode_block(const ReduceEncode& a, int64_t block, uint64_t step) {
  const Lane lane = lane_of(block, a.count);
  float s[kPerLane], sent[kPerLane], left[kPerLane];
  sum_block<kWhole>(a, block, lane, s);
  if constexpr (kCoding == Coding::none) {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) sent[k] = s[k], left[k] = 0.0f;
  } else {
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const uint32_t bits = k < lane.valid ? finite_magnitude_bits(s[k]) : 0u;
      largest = bits > largest ? bits : largest;
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, largest, offset);
      largest = other > largest ? other : largest;
    }
    auto* const wire = static_cast<uint8_t*>(a.wire);
    const uint8_t scale = fp8_scale_byte(largest);
    if (threadIdx.x % 32 == 0) wire[fp8_scales_offset(a.count) + block] = scale;

    const auto first = static_cast<uint64_t>(a.rounding.first_element + lane.begin);
    const RoundingBits random(a.rounding.seed, step, first);
    uint32_t word = 0;
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const float scaled = s[k] * fp8_inverse_scale(scale);
      uint8_t code;
      if constexpr (kCoding == Coding::nearest) {
        code = float_to_e4m3_nearest(scaled);
      } else {
        code = float_to_e4m3_stochastic(scaled, random(first + k));
      }
      word |= static_cast<uint32_t>(code) << (8 * k);
      sent[k] = fp8_scale(scale) * e4m3_to_float(code);
      left[k] = to_residual(s[k] - sent[k], residual_unit(a));
    }
    if (kWhole || lane.valid == kPerLane) {
      *reinterpret_cast<uint32_t*>(wire + lane.begin) = word;
    } else {
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        if (k < lane.valid) wire[lane.begin + k] = static_cast<uint8_t>(word >> (8 * k));
      }
    }
  }
  if (a.residual != nullptr) store_floats<kWhole>(a.residual, lane, left);
  if (a.out != nullptr) {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) sent[k] *= a.out_scale;
    store_floats<kWhole>(a.out, lane, sent);
  }
}

// Calls body(whole, block) for this warp's blocks: first for whole blocks, if the floats are wide.
template <typename Body>
__device__ __forceinline__ void for_each_block(int64_t count, bool wide, const Body& body) {
  const int64_t all = (count + kFp8Block - 1) / kFp8Block, whole = wide ? count / kFp8Block : 0;
  const int64_t stride = int64_t{gridDim.x} * kWarps;
  int64_t block = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  for (; block < whole; block += stride) body(std::true_type(), block);
  for (; block < all; block += stride) body(std::false_type(), block);
}

template <Coding kCoding, bool kAligned>
__global__ void __launch_bounds__(kThreads) fp8_reduce_encode_kernel(const __grid_constant__ ReduceEncode a) {
  const uint64_t step = step_of(a.rounding);
  for_each_block(a.count, kAligned, [&](auto whole, int64_t block) {
    reduce_encode_block<kCoding, decltype(whole)::value>(a, block, step);
  });
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) fp8_decode_kernel(const __grid_constant__ Decode a) {
  for_each_block(a.count, kAligned, [&](auto whole, int64_t block) {
    constexpr bool kWhole = decltype(whole)::value;
    const Lane lane = lane_of(block, a.count);
    float x[kPerLane];
    load_wire(a.wire, a.count, block, lane, x);
    if constexpr (!kWhole) {  // the wire's padding is undefined
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) x[k] = k < lane.valid ? x[k] : 0.0f;
    }
    forget_not_finite<kPerLane>(x, a.residual == nullptr ? nullptr : a.residual + lane.begin);
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) x[k] *= a.scale;
    store_floats<kWhole>(a.out, lane, x);
  });
}

template <bool kAligned>
auto* kernel_for(Coding coding) {
  return coding == Coding::none      ? fp8_reduce_encode_kernel<Coding::none, kAligned>
         : coding == Coding::nearest ? fp8_reduce_encode_kernel<Coding::nearest, kAligned>
                                     : fp8_reduce_encode_kernel<Coding::stochastic, kAligned>;
}

template <typename Kernel>
LaunchConfig config_for(Kernel* kernel, int64_t count, CudaStream stream) {
  return {.grid = dim3(grid_for(kernel, count, kWarps * kFp8Block, kThreads)),
          .block = dim3(kThreads),
          .stream = stream};
}

}  // namespace

template <>
void reduce_encode(CudaStream stream, const BlockCoder<Fp8>&, const ReduceEncode& a) {
  auto* kernel =
      aligned(a.own, a.residual, a.out) ? kernel_for<true>(coding_of(a)) : kernel_for<false>(coding_of(a));
  launch("fp8_reduce_encode", kernel, config_for(kernel, a.count, stream), a);
}

template <>
void decode(CudaStream stream, const BlockCoder<Fp8>&, const Decode& a) {
  auto* kernel = aligned(a.out) ? fp8_decode_kernel<true> : fp8_decode_kernel<false>;
  launch("fp8_decode", kernel, config_for(kernel, a.count, stream), a);
}

}  // namespace gradwire::cuda
