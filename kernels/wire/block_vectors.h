// What GCC does not vectorize well in the block formats, eight values at a time: packed codes, small floats
// with a scale for 16 or 32 values, rotations and Lloyd-Max levels. Rotations and levels have sixteen at a
// time where the processor has AVX-512. Bytes and values are those of the formats' own
// encode and decode, which the reference and CUDA use.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels/math/small_float.h"
#include "kernels/simd/vector.h"
#include "kernels/wire/block.h"
#include "kernels/wire/codes.h"
#include "kernels/wire/eden.h"
#include "kernels/wire/microscaling.h"

#ifdef GW_SIMD_CHOOSES
#include <immintrin.h>
// Functions for processors for which runs_wide() returns true, and for the others. The first may use WideF32.
#define GW_WIDE __attribute__((noinline, target("arch=x86-64-v4")))
#define GW_NARROW __attribute__((noinline, target_clones("arch=x86-64-v3", "default")))
#else
#define GW_NARROW
#endif

namespace gradwire::host {

inline constexpr int kWidth = kLanes<F32x8>;

template <typename V>
GW_INLINE auto magnitudes(const V& x) {
  return words_of(x) & 0x7fffffffu;
}
template <typename Words>
GW_INLINE auto floats_of(const Words& words) {
  return std::bit_cast<std::conditional_t<sizeof(Words) == sizeof(F32x8), F32x8, WideF32>>(words);
}
GW_INLINE F32x8 with_sign_of(const F32x8& magnitude, const F32x8& x) {
  return floats_of(words_of(magnitude) | (words_of(x) & 0x80000000u));
}

#ifdef GW_WIDE
inline constexpr int kRoundAsSet = 4;
GW_INLINE WideU32 larger(const WideU32& a, const WideU32& b) {
  return std::bit_cast<WideU32>(
      __builtin_ia32_pmaxud512_mask(std::bit_cast<WideI32>(a), std::bit_cast<WideI32>(b), WideI32{}, -1));
}
#endif

// Replaces infinity by the largest finite float of its sign.
template <typename V>
GW_INLINE V saturated(const V& x) {
#ifdef GW_WIDE
  constexpr int kLeastMagnitude = 2;  // with the sign of the first operand
  if constexpr (kLanes<V> == 16)
    return __builtin_ia32_rangeps512_mask(x, V{} + 0x1.fffffep127f, kLeastMagnitude, x, -1, kRoundAsSet);
  else
#endif
    return floats_of(words_of(x) + std::bit_cast<typename Lanes<V>::U32>(magnitudes(x) == 0x7f800000u));
}

// The layouts of codes.h. (GCC 12 converts vectors of bytes to vectors of words byte by byte.)

// Returns words whose low bytes are the 8 bytes at `from`. Their other bits are arbitrary.
GW_INLINE U32x8 spread_bytes(const uint8_t* from) {
  using U64x4 = uint64_t __attribute__((vector_size(32)));
  uint64_t bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  const U32x8 words = std::bit_cast<U32x8>(U64x4{bytes});
  return __builtin_shuffle(words, U32x8{0, 0, 0, 0, 1, 1, 1, 1}) >> U32x8{0, 8, 16, 24, 0, 8, 16, 24};
}
// Stores the low bytes of the first kCount of 16 words.
template <int kCount>
GW_INLINE void put_bytes(const U32x8& low, const U32x8& high, uint8_t* to) {
  alignas(32) uint32_t words[16];
  alignas(16) uint8_t bytes[16];
  store(words, low);
  store(words + 8, high);
#pragma omp simd
  for (int i = 0; i < 16; ++i) bytes[i] = static_cast<uint8_t>(words[i]);
  std::memcpy(to, bytes, kCount);
}

// Packs bits [from, from + kBits) of n codes; ignores the other bits. Words: the vector that holds codes.
template <int kBits, typename Words>
GW_INLINE void pack_words(const uint32_t* codes, int n, int from, uint8_t* bytes) {
  constexpr uint32_t kMask = (1u << kBits) - 1u;
  const int m = n * kBits / 8;
  const auto at = [=](int j, auto byte) __attribute__((always_inline)) {
    for (int part = 0; part < 8 / kBits; ++part)
      byte |= ((load<decltype(byte)>(codes + part * m + j) >> from) & kMask) << (part * kBits);
    return byte;
  };
  int j = 0;
  for (; j + 16 <= m; j += 16) {
#ifdef GW_WIDE
    if constexpr (std::is_same_v<Words, WideU32>) {
      using Bytes = char __attribute__((vector_size(16)));
      const auto words = std::bit_cast<WideI32>(at(j, WideU32{}));
      store(bytes + j, __builtin_ia32_pmovdb512_mask(words, Bytes{}, -1));
      continue;
    }
#endif
    put_bytes<16>(at(j, U32x8{}), at(j + 8, U32x8{}), bytes + j);
  }
  for (; j + 8 <= m; j += 8) put_bytes<8>(at(j, U32x8{}), U32x8{}, bytes + j);
  for (; j < m; ++j) {
    uint32_t byte = 0;
    for (int part = 0; part < 8 / kBits; ++part)
      byte |= ((codes[part * m + j] >> from) & kMask) << (part * kBits);
    bytes[j] = static_cast<uint8_t>(byte);
  }
}
// Sets bits [to, to + kBits) of n codes and, unless kAdd, clears the other bits.
template <int kBits, bool kAdd>
GW_INLINE void unpack_words(const uint8_t* bytes, int n, int to, uint32_t* codes) {
  constexpr uint32_t kMask = (1u << kBits) - 1u;
  const int m = n * kBits / 8;
  int j = 0;
  for (; j + 8 <= m; j += 8) {
    const U32x8 word = spread_bytes(bytes + j);
    for (int part = 0; part < 8 / kBits; ++part) {
      uint32_t* const at = codes + part * m + j;
      const U32x8 code = ((word >> (part * kBits)) & kMask) << to;
      store(at, kAdd ? load<U32x8>(at) | code : code);
    }
  }
  for (; j < m; ++j) {
    for (int part = 0; part < 8 / kBits; ++part) {
      const uint32_t code = ((static_cast<uint32_t>(bytes[j]) >> (part * kBits)) & kMask) << to;
      codes[part * m + j] = kAdd ? codes[part * m + j] | code : code;
    }
  }
}
template <int kBits, typename Words = U32x8>
GW_INLINE void pack_all(const uint32_t* codes, int n, uint8_t* bytes) {
  constexpr int kLower = lower_code_bits(kBits);
  pack_words<kLower, Words>(codes, n, 0, bytes);
  if constexpr (kLower < kBits) pack_words<kBits - kLower, Words>(codes, n, kLower, bytes + n * kLower / 8);
}
template <int kBits>
GW_INLINE void unpack_all(const uint8_t* bytes, int n, uint32_t* codes) {
  constexpr int kLower = lower_code_bits(kBits);
  unpack_words<kLower, false>(bytes, n, 0, codes);
  if constexpr (kLower < kBits) unpack_words<kBits - kLower, true>(bytes + n * kLower / 8, n, kLower, codes);
}

// SmallFloat (kernels/math/small_float.h) for eight numbers.

template <typename Float>
GW_INLINE F32x8 small_values(const U32x8& codes) {
  const F32x8 low = __builtin_convertvector(std::bit_cast<I32x8>(codes), F32x8) *
                    (bits_float(Float::kMin) / static_cast<float>(Float::kOne));
  return codes < Float::kOne ? low : floats_of((codes << Float::kDropped) + (Float::kMin - (1u << 23)));
}
// Rounds |x|. Sets the codes and returns their values. `random`: 16 bits for each number, or null to round to
// nearest.
template <typename Float>
GW_INLINE F32x8 round_to_small(const F32x8& x, const uint16_t* random, U32x8& codes) {
  const U32x8 most = U32x8{} + float_bits(Float::most()), any = magnitudes(x);
  const U32x8 magnitude = any < most ? any : most;
  if (random == nullptr) {
    const U32x8 binade = larger(magnitude & 0x7f800000u, U32x8{} + Float::kMin);
    const F32x8 large = floats_of(binade + (static_cast<uint32_t>(Float::kDropped) << 23));
    const F32x8 sum = floats_of(magnitude) + large;
    codes = words_of(sum) - words_of(large) + ((binade - Float::kMin) >> Float::kDropped);
    return sum - large;
  }
  const F32x8 least = F32x8{} + bits_float(Float::kMin);
  const I32x8 low = floats_of(magnitude) < least;
  const U32x8 bits = words_of(floats_of(magnitude) + blend(low, least, F32x8{}));
  const U32x8 draws = __builtin_convertvector(load<U16x8>(random), U32x8) << (Float::kDropped - 16);
  codes = ((bits + draws) >> Float::kDropped) - ((Float::kMin >> Float::kDropped) - Float::kOne) -
          (std::bit_cast<U32x8>(low) & Float::kOne);
  return small_values<Float>(codes);
}

// Returns e8m0_for() of eight largest magnitudes, given as bits.
GW_INLINE U32x8 e8m0_scales(const U32x8& bits, int exponent, float fraction) {
  const U32x8 limit = U32x8{} + static_cast<uint32_t>(fraction * 8388608.0f);
  I32x8 byte = std::bit_cast<I32x8>(bits >> 23) - exponent - ((bits & 0x7fffffu) > limit);
  byte = byte > 253 - exponent ? I32x8{} + (253 - exponent) : byte;
  return std::bit_cast<U32x8>(byte < 1 ? I32x8{} + 1 : byte);
}

// Returns y and y's partners, whose lane differs in bit kBit, as sums where the bit is 0 and as differences
// where it is 1.
template <int kBit, typename V>
GW_INLINE V butterfly(const V& y) {
  const auto index = Lanes<V>::kIndex;
  const V partner = __builtin_shuffle(y, index ^ kBit);
#ifdef GW_WIDE
  if constexpr (kLanes<V> == 16) {  // the product is exact, so this rounds once, as an addition does
    const V sign = (index & kBit) != 0 ? V{} - 1.0f : V{} + 1.0f;
    return __builtin_ia32_vfmaddps512_mask(y, sign, partner, -1, kRoundAsSet);
  } else
#endif
  {
    const auto minus = std::bit_cast<U32x8>((index & kBit) != 0) & 0x80000000u;
    return partner + floats_of(words_of(y) ^ minus);
  }
}

// V: the vector that holds values.
template <typename V>
struct RotatingLane {
  // Does the same as rotate_block and rotate_block_back of block.h, with the steps before and after the
  // butterflies in registers. n is a power of two, at least 16.
  GW_INLINE void rotate(const float* values, int n, float scale, float* to) const {
    hadamard(
        n, to, [=](int i) GW_HD_LAMBDA { return with_sign(scale * load<V>(values + i), i); },
        [=](int i, const V& x) GW_HD_LAMBDA { store(to + i, x); });
  }
  GW_INLINE void rotate_back(float* to, int n) const {
    rotate_back(to, n, [=](int i, const V& x) GW_HD_LAMBDA { store(to + i, x); });
  }
  // Calls take(i, x) with values i, i + 1, ... after the inverse; overwrites `values`.
  template <typename Take>
  GW_INLINE void rotate_back(float* values, int n, const Take& take) const {
    hadamard(
        n, values, [=](int i) GW_HD_LAMBDA { return kRotationDown * load<V>(values + i); },
        [&](int i, const V& x) GW_HD_LAMBDA { take(i, with_sign(saturated(kRotationUp * x), i)); });
  }

 private:
  using Words = typename Lanes<V>::U32;
  static constexpr int kStep = kLanes<V>, kInRegisters = 16 * kStep;

  GW_INLINE static V with_sign(const V& x, int i) {
    return std::bit_cast<V>(words_of(x) ^ load<Words>(kRotationSigns.of + i));
  }
  // Transforms n vectors' values from(i), and passes them to `take`. `scratch` has room for n values.
  template <typename From, typename Take>
  GW_INLINE static void hadamard(int n, float* scratch, const From& from, const Take& take) {
    if (n > kInRegisters) {
      if (n == 2 * kInRegisters) {
        across<2>(n, scratch, from);
      } else {
        across<4>(n, scratch, from);
      }
      const auto loaded = [=](int i) GW_HD_LAMBDA { return load<V>(scratch + i); };
      for (int begin = 0; begin < n; begin += kInRegisters) in_registers<16>(begin, loaded, take);
    } else {
      all_in_registers(n, from, take);
    }
  }
  template <int kVectors = 16, typename From, typename Take>
  GW_INLINE static void all_in_registers(int n, const From& from, const Take& take) {
    if constexpr (kVectors * kStep > 16) {
      if (n < kVectors * kStep) return all_in_registers<kVectors / 2>(n, from, take);
    }
    in_registers<kVectors>(0, from, take);
  }
  template <int kVectors>
  GW_INLINE static void butterflies(V (&v)[kVectors]) {
#pragma GCC unroll 5
    for (int h = kVectors / 2; h > 0; h /= 2) {
#pragma GCC unroll 16
      for (int k = 0; k < kVectors; ++k) {
        if ((k & h) != 0) continue;
        const V a = v[k], b = v[k + h];
        v[k] = a + b;
        v[k + h] = a - b;
      }
    }
  }
  // Applies the levels between kParts parts of the values.
  template <int kParts, typename From>
  GW_INLINE static void across(int n, float* to, const From& from) {
    for (int i = 0; i < n / kParts; i += kStep) {
      V v[kParts];
#pragma GCC unroll 16
      for (int k = 0; k < kParts; ++k) v[k] = from(i + k * (n / kParts));
      butterflies(v);
#pragma GCC unroll 16
      for (int k = 0; k < kParts; ++k) store(to + i + k * (n / kParts), v[k]);
    }
  }
  // Applies the butterflies to kVectors vectors, and within each.
  template <int kVectors, typename From, typename Take>
  GW_INLINE static void in_registers(int begin, const From& from, const Take& take) {
    V v[kVectors];
#pragma GCC unroll 16
    for (int k = 0; k < kVectors; ++k) v[k] = from(begin + k * kStep);
    butterflies(v);
#pragma GCC unroll 16
    for (int k = 0; k < kVectors; ++k) {
      V y = v[k];
      if constexpr (kStep == 16) y = butterfly<8>(y);
      y = butterfly<1>(butterfly<2>(butterfly<4>(y)));
      take(begin + k * kStep, y);
    }
  }
};

template <int kBits = 5, typename Body>
GW_INLINE void with_bits(int bits, const Body& body) {
  if constexpr (kBits > 1) {
    if (bits < kBits) return with_bits<kBits - 1>(bits, body);
  }
  body(std::integral_constant<int, kBits>());
}

// The Lloyd-Max levels of Eden.
template <int kBits>
struct Levels {
  static constexpr int bits = kBits;
  static constexpr uint32_t kSign = 1u << (kBits - 1);

  // Return the codes of magnitudes, the levels of codes without a sign, and scaled levels of all codes.
  GW_INLINE U32x8 codes_of(const F32x8& magnitude) const {
    I32x8 code = {};
    with_lloyd_max<kBits>([&](auto... all) __attribute__((always_inline)) {
      const float bounds[] = {all...};
      for (int k = 1; k < (1 << kBits) - 1; k += 2) code -= magnitude > bounds[k];
    });
    return std::bit_cast<U32x8>(code);
  }
  GW_INLINE F32x8 of(const U32x8& codes) const {
    alignas(32) float table[16] = {};
    with_lloyd_max<kBits>([&](auto... x) __attribute__((always_inline)) {
      const float all[] = {x...};
      for (int k = 0; k < 1 << (kBits - 1); ++k) table[k] = all[2 * k];
    });
    if constexpr (kBits < 5) return __builtin_shuffle(load<F32x8>(table), std::bit_cast<I32x8>(codes));
    return __builtin_shuffle(load<F32x8>(table), load<F32x8>(table + 8), std::bit_cast<I32x8>(codes));
  }
  GW_INLINE F32x8 scaled(float scale, const U32x8& codes) const {
    const F32x8 x = scale * of(codes & (kSign - 1u));
    return floats_of(words_of(x) ^ ((codes & kSign) << (32 - kBits)));
  }
};

#ifdef GW_WIDE
template <int kBits>
inline constexpr LevelBins<kBits> kLevelBins;

// The same for any number of bits, by permutations of the tables of LevelBins.
struct WideLevels {
  int bits;
  float per, most;
  WideF32 boundary[2], level[2];
  WideI32 before[2];

  GW_INLINE explicit WideLevels(int its_bits) : bits(its_bits) {
    with_bits(
        bits, [this](auto b) __attribute__((always_inline)) {
          per = LevelBins<b>::kPer;
          for (int half = 0; half < 2; ++half) {
            boundary[half] = load<WideF32>(kLevelBins<b>.boundary + 16 * half);
            level[half] = load<WideF32>(kLevelBins<b>.level + 16 * half);
            before[half] = load<WideI32>(kLevelBins<b>.before + 16 * half);
          }
        });
    most = 30.0f / per;
  }
  GW_INLINE WideU32 codes_of(const WideF32& magnitude) const {
    const WideF32 limit = WideF32{} + most, x = limit < magnitude ? limit : magnitude;  // keeps NaN
    const WideI32 bin = std::bit_cast<WideI32>(x * per + 8388608.0f);
    const WideI32 code = __builtin_shuffle(before[0], before[1], bin);
    return std::bit_cast<WideU32>(x > __builtin_shuffle(boundary[0], boundary[1], bin) ? code + 1 : code);
  }
  GW_INLINE WideF32 of(const WideU32& codes) const {
    return __builtin_shuffle(level[0], level[1], std::bit_cast<WideI32>(codes));
  }
  GW_INLINE WideF32 scaled(float scale, const WideU32& codes) const { return scale * of(codes); }
};
#endif

// Encodes and decodes whole runs of kRun values, or of a block if it is longer.
template <typename V>
struct RunLane : RotatingLane<V> {
  static constexpr int kRun = 256;

  // Encode a run and return true, or return false if a value is not finite. The sink gets the decoded values.
  template <int kMantissa, typename Sink>
  GW_INLINE bool encode_run(const MxMini<kMantissa>&, const float* values, const uint16_t* random,
                            uint8_t* to, const Sink& sink) const {
    using Format = MxMini<kMantissa>;
    const U32x8 most = largest_of_eight<32>(values);
    if (host::largest_of(most) >= 0x7f800000u) return false;
    const U32x8 bytes = e8m0_scales(most, 2, kMantissa == 1 ? 0.5f : 0.875f);
    alignas(32) uint32_t byte[8];
    alignas(32) float unit[8], inverse[8];
    store(byte, bytes);
    store(unit, floats_of(bytes << 23));
    store(inverse, floats_of((254u - bytes) << 23));
    for (int b = 0; b < 8; ++b, to += Format::bytes()) {
      const float down = inverse[b], up = unit[b];
      encode_minis<kMantissa, 32>(
          values, 32 * b, random, to,
          sink, [=](int, const F32x8& x) __attribute__((always_inline)) { return x * down; },
          [=](int, const F32x8& x) __attribute__((always_inline)) { return up * x; });
      to[Format::kCodes] = static_cast<uint8_t>(byte[b]);
    }
    return true;
  }
  template <typename Sink>
  GW_INLINE bool encode_run(const NvFp4&, const float* values, const uint16_t* random, uint8_t* to,
                            const Sink& sink) const {
    for (int begin = 0; begin < kRun; begin += 128, to += NvFp4::bytes()) {
      const U32x8 most = largest_of_eight<16>(values + begin);
      const uint32_t largest = host::largest_of(most);
      if (largest >= 0x7f800000u) return false;
      const uint8_t byte = e8m0_for(largest, 10, 0.5f);
      const float down = fp8_inverse_scale(byte), unit = fp8_scale(byte);
      U32x8 codes;
      const F32x8 scales = round_to_small<E4M3>(floats_of(most) * down * (1.0f / 6.0f), nullptr, codes);
      alignas(32) float up[8], scale[8];
      store(up, blend(scales > 0.0f, 1.0f / scales, F32x8{}));
      store(scale, scales);
      encode_minis<1, 128>(
          values, begin, random, to,
          sink, [&](int i, const F32x8& x) __attribute__((always_inline)) { return x * down * up[i / 16]; },
          [&](int i, const F32x8& x) __attribute__((always_inline)) { return unit * (scale[i / 16] * x); });
      put_bytes<8>(codes, U32x8{}, to + 64);
      to[72] = byte;
    }
    return true;
  }

  // Encode a block of rotated values, and set `decoded` unless it is null; decode a block.
  GW_INLINE void encode_block(const Eden& format, const float* values, uint8_t* to,
                              float* decoded = nullptr) const {
    alignas(64) uint32_t codes[Eden::kMaxBlock];
    const int n = format.size;
    with_levels(
        format, [&](const auto& levels) __attribute__((always_inline)) {
          const float scale = encode_levels(levels, values, n, codes);
          put_float(to + n * format.bits / 8, scale);
          if (decoded != nullptr) put_levels(levels, codes, n, scale, decoded);
        });
    with_bits(
        format.bits, [&](auto bits) __attribute__((always_inline)) { pack_all<bits, Words>(codes, n, to); });
  }
  GW_INLINE void decode_block(const Eden& format, const uint8_t* from, float* values) const {
    alignas(64) uint32_t codes[Eden::kMaxBlock];
    const int n = format.size;
    with_bits(
        format.bits, [&](auto bits) __attribute__((always_inline)) { unpack_all<bits>(from, n, codes); });
    with_levels(
        format, [&](const auto& levels) __attribute__((always_inline)) {
          put_levels(levels, codes, n, get_float(from + n * format.bits / 8), values);
        });
  }
  template <int kMantissa>
  GW_INLINE void decode_block(const MxMini<kMantissa>&, const uint8_t* from, float* values) const {
    const float unit = fp8_scale(from[MxMini<kMantissa>::kCodes]);
    decode_minis<kMantissa, 32>(
        from, values, [=](int, const F32x8& x) __attribute__((always_inline)) { return unit * x; });
  }
  GW_INLINE void decode_block(const NvFp4&, const uint8_t* from, float* values) const {
    float scale[8];
    for (int g = 0; g < 8; ++g) scale[g] = e4m3_to_float(from[64 + g]);
    const float unit = fp8_scale(from[72]);
    decode_minis<1, 128>(
        from, values, [&](int i, const F32x8& x) __attribute__((always_inline)) {
          return unit * (scale[i / 16] * x);
        });
  }

 private:
  template <int kMantissa>
  using Magnitude = typename Mini<kMantissa>::Magnitude;

  using Words = typename Lanes<V>::U32;
  static constexpr int kStep = kLanes<V>, kSums = 32 / kStep;

  template <typename Body>
  GW_INLINE static void with_levels(const Eden& format, const Body& body) {
#ifdef GW_WIDE
    if constexpr (kStep == 16) body(WideLevels(format.bits));
#endif
    if constexpr (kStep == 8)
      with_bits(
          format.bits, [&](auto bits) __attribute__((always_inline)) { body(Levels<bits>()); });
  }
  template <typename Of>
  GW_INLINE static void put_levels(const Of& levels, const uint32_t* codes, int n, float scale, float* to) {
    for (int i = 0; i < n; i += kStep) store(to + i, levels.scaled(scale, load<Words>(codes + i)));
  }
  // Does Eden::encode_bits() without packing the codes, and returns the scale.
  template <typename Of>
  GW_INLINE static float encode_levels(const Of& levels, const float* values, int n, uint32_t* codes) {
    const uint8_t near = near_exponent(largest_of(values, n));
    const float down = fp8_inverse_scale(near);
    V squares[kSums] = {}, dots[kSums] = {}, norms[kSums] = {};  // 32 sums, as in OneLane::sum()
    for (int i = 0; i < n; i += 32) {
      for (int v = 0; v < kSums; ++v) {
        const V x = load<V>(values + i + kStep * v) * down;
        squares[v] += x * x;
      }
    }
    const float deviation = sqrtf(sum(squares) / static_cast<float>(n));
    const float per = deviation > 0.0f ? down / deviation : 0.0f;
    const uint32_t sign = 1u << (levels.bits - 1);
    const int shift = 32 - levels.bits;
    for (int i = 0; i < n; i += 32) {
      for (int v = 0; v < kSums; ++v) {
        const V x = load<V>(values + i + kStep * v);
        const Words code = levels.codes_of(floats_of(magnitudes(x)) * per);
        const V level = levels.of(code);
        dots[v] += floats_of(magnitudes(x * down)) * level;
        norms[v] += level * level;
        store(codes + i + kStep * v, code | (words_of(x) >> shift & sign));
      }
    }
    const float best = sum(dots) / sum(norms) * fp8_scale(near), most = 0x1p126f;
    return best > most ? most : best;
  }
  GW_INLINE static float sum(const V (&x)[kSums]) {
    const auto all = std::bit_cast<Pair<F32x16>>(x);
    return sum_of(all.low + all.high);
  }
  // Returns the largest magnitude of n values, a multiple of 32, as bits.
  GW_INLINE static uint32_t largest_of(const float* values, int n) {
    Words most[kSums] = {};
    for (int i = 0; i < n; i += 32) {
      for (int v = 0; v < kSums; ++v) most[v] = larger(most[v], magnitudes(load<V>(values + i + kStep * v)));
    }
    const auto all = std::bit_cast<Pair<U32x16>>(most);
    const U32x16 rest = larger(all.low, all.high);
    return host::largest_of(larger(rest.low, rest.high));
  }
  // Returns the largest magnitudes of eight groups of kGroup values, as bits.
  template <int kGroup>
  GW_INLINE static U32x8 largest_of_eight(const float* values) {
    U32x8 most[8], four[4], two[2];
    for (int g = 0; g < 8; ++g) {
      most[g] = magnitudes(load<F32x8>(values + kGroup * g));
      for (int i = 8; i < kGroup; i += 8)
        most[g] = larger(most[g], magnitudes(load<F32x8>(values + kGroup * g + i)));
    }
    const auto join = [](const U32x8& a, const U32x8& b) __attribute__((always_inline)) {
      return larger(a, b);
    };
    for (int i = 0; i < 4; ++i) four[i] = join_halves<4>(most[2 * i], most[2 * i + 1], join);
    for (int i = 0; i < 2; ++i) two[i] = join_halves<2>(four[2 * i], four[2 * i + 1], join);
    return join_halves<1>(two[0], two[1], join);
  }
  // Encodes values begin to begin + n. to_units(i, x) scales values i to i + 7, from_units() scales back.
  template <int kMantissa, int n, typename Sink, typename ToUnits, typename FromUnits>
  GW_INLINE void encode_minis(const float* values, int begin, const uint16_t* random, uint8_t* to,
                              const Sink& sink, const ToUnits& to_units, const FromUnits& from_units) const {
    alignas(32) uint32_t words[n];
    const auto encode = [&](auto draws) __attribute__((always_inline)) {
      for (int i = 0; i < n; i += 8) {
        const F32x8 units = to_units(i, load<F32x8>(values + begin + i));
        U32x8 codes;
        const F32x8 sent =
            round_to_small<Magnitude<kMantissa>>(units, draws ? random + begin + i : nullptr, codes);
        store(words + i, codes | (words_of(units) >> 31) * Mini<kMantissa>::kSign);
        if constexpr (!std::is_same_v<Sink, NoSink>)
          sink.template put_vector<false>(begin + i, from_units(i, with_sign_of(sent, units)));
      }
    };
    if (random != nullptr) {
      encode(std::true_type());
    } else {
      encode(std::false_type());
    }
    pack_all<3 + kMantissa>(words, n, to);
  }
  template <int kMantissa, int n, typename FromUnits>
  GW_INLINE void decode_minis(const uint8_t* from, float* values, const FromUnits& from_units) const {
    constexpr uint32_t kSign = Mini<kMantissa>::kSign;
    alignas(32) uint32_t words[n];
    unpack_all<3 + kMantissa>(from, n, words);
    for (int i = 0; i < n; i += 8) {
      const U32x8 codes = load<U32x8>(words + i);
      F32x8 x;
      if constexpr (kMantissa == 1) {
        x = __builtin_shuffle(F32x8{0, 0.5f, 1, 1.5f, 2, 3, 4, 6}, std::bit_cast<I32x8>(codes));
      } else {
        x = small_values<Magnitude<kMantissa>>(codes & (kSign - 1u));
      }
      store(values + i, from_units(i, with_sign_of(x, floats_of(codes << (29 - kMantissa)))));
    }
  }
};

}  // namespace gradwire::host
