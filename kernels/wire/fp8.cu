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
#include "kernels/wire/block_lanes.cuh"

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

template <bool kWhole>
__device__ __forceinline__ Lane lane_of(int64_t block, int64_t count) {
  const int64_t begin = block * kFp8Block + static_cast<int64_t>(threadIdx.x % 32) * kPerLane;
  const int64_t left = count - begin;
  if constexpr (kWhole) return {begin, kPerLane};
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

// A lane's codes of a block, and the block's scale. Encoded arrays are 16-byte aligned and padded to 16
// codes, so a lane with any value may read its four codes as one word.
struct Coded {
  uint32_t word = 0, scale = 0;
  __device__ __forceinline__ void load(const void* input, int64_t scale_at, const Lane& lane) {
    const auto* wire = static_cast<const uint8_t*>(input);
    scale = wire[scale_at];
    if (lane.valid > 0) word = *reinterpret_cast<const uint32_t*>(wire + lane.begin);
  }
  __device__ __forceinline__ void decode(float (&x)[kPerLane]) const {
    e4m3x4_to_floats(word, x);
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) x[k] = fp8_scale(static_cast<uint8_t>(scale)) * x[k];
  }
};

// Adds inputs [first, first + kAtOnce) to s. The barrier keeps ptxas from waiting for the first word before
// the other loads, to save registers.
template <int kAtOnce>
__device__ __forceinline__ void add_inputs(const ReduceEncode& a, int first, int64_t scale_at,
                                           const Lane& lane, float (&s)[kPerLane]) {
  Coded coded[kAtOnce];
#pragma unroll
  for (int j = 0; j < kAtOnce; ++j) coded[j].load(a.inputs[first + j], scale_at, lane);
  if constexpr (kAtOnce > 1) __syncwarp();
#pragma unroll
  for (int j = 0; j < kAtOnce; ++j) {
    float x[kPerLane];
    coded[j].decode(x);
    add<kPerLane>(a.input_scale(first + j), x, s);
  }
}

// Sums a lane's values as in format.h.
template <bool kWhole>
__device__ __forceinline__ void sum_block(const ReduceEncode& a, int64_t scale_at, const Lane& lane,
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
  int input = 0, end = a.own_position;
#pragma unroll 1
  for (bool added = false;; added = true, end = a.num_inputs) {  // inputs before `own`, then after it
#pragma unroll 1
    while (input < end) {
      if (input + 4 <= end) {
        add_inputs<4>(a, input, scale_at, lane, s), input += 4;
      } else if (input + 2 <= end) {
        add_inputs<2>(a, input, scale_at, lane, s), input += 2;
      } else {
        add_inputs<1>(a, input++, scale_at, lane, s);
      }
    }
    if (!added) add<kPerLane>(a.own_scale, own, s);
    if (input == a.num_inputs) return;
  }
}

// Returns 16 random bits for each of four elements, packed. A word of random bits serves elements i and
// i + 8, which lanes l and l ^ 2 hold where blocks begin at multiples of 16: each computes two of their four
// words.
__device__ __forceinline__ uint2 random_of(const ReduceEncode& a, const RoundingBits& random, int64_t begin) {
  const auto first = static_cast<uint64_t>(a.rounding.first_element + begin);
  if (a.rounding.first_element % 16 != 0) {
    return make_uint2(random(first) | random(first + 1) << 16, random(first + 2) | random(first + 3) << 16);
  }
  const bool upper = (threadIdx.x & 2u) != 0;  // this lane's elements take the upper halves
  const RoundingKey key = random.key_of(first);
  const uint32_t mine = rounding_word_of(first) + (upper ? 2u : 0u);
  const uint32_t one = rounding_word(key, mine), two = rounding_word(key, mine + 1u);
  const uint32_t low = __byte_perm(one, two, 0x5410u), high = __byte_perm(one, two, 0x7632u);
  const uint32_t kept = upper ? high : low;
  const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? low : high, 2);
  return upper ? make_uint2(other, kept) : make_uint2(kept, other);
}

// Encodes a lane's sums, which are 0 where a value does not exist. Returns the codes and the block's scale.
template <Coding kCoding>
__device__ __forceinline__ Coded encode_lane(const ReduceEncode& a, const Lane& lane,
                                             const RoundingBits& draws, const float (&s)[kPerLane]) {
  uint32_t largest = __reduce_max_sync(0xffffffffu, largest_magnitude(s));
  const bool usual = largest <= kFp8MostBits;  // no value is clamped, and none is NaN or Inf
  if (!usual) {
    largest = 0;
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) largest = max(largest, finite_magnitude_bits(s[k]));
    largest = __reduce_max_sync(0xffffffffu, largest);
  }
  const uint8_t scale = fp8_scale_byte(largest);
  float x[kPerLane];
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) x[k] = s[k] * fp8_inverse_scale(scale);
  uint32_t none = 0;  // the codes of values that are not finite, without signs
  if (!usual) {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      none |= is_finite(x[k]) ? 0u : 0x7fu << (8 * k);
      x[k] = is_finite(x[k]) ? within(x[k], E4M3::most()) : bits_float(float_bits(x[k]) & 0x80000000u);
    }
  }
  if constexpr (kCoding == Coding::stochastic) {
    const uint2 random = random_of(a, draws, lane.begin);
    x[0] = e4m3_stochastic(x[0], random.x & 0xffffu);
    x[1] = e4m3_stochastic(x[1], random.x >> 16);
    x[2] = e4m3_stochastic(x[2], random.y & 0xffffu);
    x[3] = e4m3_stochastic(x[3], random.y >> 16);
  }
  return {floats_to_e4m3x4(x) | none, scale};
}

template <Coding kCoding, bool kWhole>
__device__ __forceinline__ void reduce_encode_block(const ReduceEncode& a, const RoundingBits& draws,
                                                    int64_t block) {
  const Lane lane = lane_of<kWhole>(block, a.count);
  const int64_t scale_at = fp8_scales_offset(a.count) + block;
  float s[kPerLane], sent[kPerLane], left[kPerLane];
  sum_block<kWhole>(a, scale_at, lane, s);
  if constexpr (kCoding == Coding::none) {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) sent[k] = s[k], left[k] = 0.0f;
  } else {
    if constexpr (!kWhole) {  // the wire's padding is undefined
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) s[k] = k < lane.valid ? s[k] : 0.0f;
    }
    const Coded coded = encode_lane<kCoding>(a, lane, draws, s);
    auto* const wire = static_cast<uint8_t*>(a.wire);
    if (threadIdx.x % 32 == 0) wire[scale_at] = static_cast<uint8_t>(coded.scale);
    if (kWhole || lane.valid == kPerLane) {
      *reinterpret_cast<uint32_t*>(wire + lane.begin) = coded.word;
    } else {
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        if (k < lane.valid) wire[lane.begin + k] = static_cast<uint8_t>(coded.word >> (8 * k));
      }
    }
    if (a.residual == nullptr && a.out == nullptr) return;
    coded.decode(sent);
    to_residuals(s, sent, residual_unit(a), false, left);
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
__global__ void __launch_bounds__(kThreads, 5)
    fp8_reduce_encode_kernel(const __grid_constant__ ReduceEncode a) {
  const RoundingBits draws(a.rounding.seed, kCoding == Coding::stochastic ? step_of(a.rounding) : 0,
                           static_cast<uint64_t>(a.rounding.first_element));
  for_each_block(a.count, kAligned, [&](auto whole, int64_t block) {
    reduce_encode_block<kCoding, decltype(whole)::value>(a, draws, block);
  });
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) fp8_decode_kernel(const __grid_constant__ Decode a) {
  for_each_block(a.count, kAligned, [&](auto whole, int64_t block) {
    constexpr bool kWhole = decltype(whole)::value;
    const Lane lane = lane_of<kWhole>(block, a.count);
    float x[kPerLane];
    Coded coded;
    coded.load(a.wire, fp8_scales_offset(a.count) + block, lane);
    coded.decode(x);
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
