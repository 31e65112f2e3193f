// Vectors of eight and sixteen values for the block formats on the host, and the rotation of a block: the
// butterflies stay in registers. Sixteen values are one register of AVX-512.
#pragma once

#include <bit>
#include <cstring>

#include "kernels/simd/vector.h"
#include "kernels/wire/block.h"

#ifdef GW_SIMD_CHOOSES
#include <immintrin.h>
// Functions for processors for which runs_wide() returns true, which may use WideF32, and for the others.
#define GW_WIDE __attribute__((noinline, target("arch=x86-64-v4")))
#define GW_NARROW __attribute__((noinline, target_clones("arch=x86-64-v3", "default")))

namespace gradwire {

// Sixteen lanes in one register of AVX-512.
using WideF32 = float __attribute__((vector_size(64)));
using WideI32 = int32_t __attribute__((vector_size(64)));
using WideU32 = uint32_t __attribute__((vector_size(64)));
template <>
struct Lanes<WideF32> {
  using I32 = WideI32;
  using U32 = WideU32;
  static constexpr I32 kIndex = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
};

}  // namespace gradwire
#else
#define GW_NARROW
#endif

namespace gradwire::host {

inline constexpr int kWidth = kLanes<F32x8>;

template <typename V>
GW_INLINE auto magnitudes(const V& x) {
  return words_of(x) & 0x7fffffffu;
}
GW_INLINE F32x8 floats_of(const U32x8& words) {
  return std::bit_cast<F32x8>(words);
}
GW_INLINE F32x8 with_sign_of(const F32x8& magnitude, const F32x8& x) {
  return floats_of(words_of(magnitude) | (words_of(x) & 0x80000000u));
}

// Replaces infinity by the largest finite float of its sign.
GW_INLINE F32x8 saturated(const F32x8& x) {
  return floats_of(words_of(x) + std::bit_cast<U32x8>(magnitudes(x) == 0x7f800000u));
}

#ifdef GW_WIDE
inline constexpr int kRoundAsSet = 4;
GW_INLINE WideF32 floats_of(const WideU32& words) {
  return std::bit_cast<WideF32>(words);
}
GW_INLINE WideF32 saturated(const WideF32& x) {
  constexpr int kLeastMagnitude = 2;  // with the sign of the first operand
  return __builtin_ia32_rangeps512_mask(x, WideF32{} + 0x1.fffffep127f, kLeastMagnitude, x, -1, kRoundAsSet);
}
GW_INLINE WideU32 larger(const WideU32& a, const WideU32& b) {
  return std::bit_cast<WideU32>(
      __builtin_ia32_pmaxud512_mask(std::bit_cast<WideI32>(a), std::bit_cast<WideI32>(b), WideI32{}, -1));
}
GW_INLINE uint32_t largest_of(const WideU32& v) {
  const auto [low, high] = std::bit_cast<U32x16>(v);
  return largest_of(larger(low, high));
}
// Returns the low bytes of sixteen words.
GW_INLINE auto low_bytes(const WideU32& words) {
  using Bytes = char __attribute__((vector_size(16)));
  return __builtin_ia32_pmovdb512_mask(std::bit_cast<WideI32>(words), Bytes{}, -1);
}
#endif

// Returns y and y's partners, whose lane differs in bit kBit, as sums where the bit is 0 and as differences
// where it is 1.
template <int kBit>
GW_INLINE F32x8 butterfly(const F32x8& y) {
  const I32x8 index = Lanes<F32x8>::kIndex;
  const U32x8 minus = std::bit_cast<U32x8>((index & kBit) != 0) & 0x80000000u;
  return __builtin_shuffle(y, index ^ kBit) + floats_of(words_of(y) ^ minus);
}
#ifdef GW_WIDE
template <int kBit>
GW_INLINE WideF32 butterfly(const WideF32& y) {
  const WideI32 index = Lanes<WideF32>::kIndex;
  const WideF32 sign = (index & kBit) != 0 ? WideF32{} - 1.0f : WideF32{} + 1.0f;
  // The product is exact, so this rounds once, as an addition does.
  return __builtin_ia32_vfmaddps512_mask(y, sign, __builtin_shuffle(y, index ^ kBit), -1, kRoundAsSet);
}
#endif

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
  GW_INLINE void rotate_back(float* values, int n) const {
    rotate_back(values, n, [=](int i, const V& x) GW_HD_LAMBDA { store(values + i, x); });
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
    } else if (n == 16 * kStep) {
      in_registers<16>(0, from, take);
    } else if (n == 8 * kStep) {
      in_registers<8>(0, from, take);
    } else if (n == 4 * kStep) {
      in_registers<4>(0, from, take);
    } else if (n == 2 * kStep) {
      in_registers<2>(0, from, take);
    } else {
      in_registers<1>(0, from, take);
    }
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

}  // namespace gradwire::host
