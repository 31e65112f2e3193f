// Floats of a few bits as integer codes: conversions in both directions take a few instructions, vectorize,
// and give the same bits on host and device.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define GW_HD __host__ __device__ __forceinline__
#define GW_HD_LAMBDA
#elif defined(__GNUC__)
#define GW_HD __attribute__((always_inline)) inline
#define GW_HD_LAMBDA __attribute__((always_inline))
#else
#define GW_HD inline
#define GW_HD_LAMBDA
#endif
#ifdef __CUDA_ARCH__
#define GW_NO_UNROLL _Pragma("unroll 1")
#else
#define GW_NO_UNROLL
#endif

namespace gradwire {

// FP32 <-> BF16 by bit arithmetic, the same on host and device.
//
// Rounding keeps two promises that the wire needs: a finite value never becomes infinite (it saturates at the
// largest finite BF16, 3.3895e38, and error feedback keeps the rest), and a NaN stays a NaN.

// A BF16 number in memory, as an operand of matrix products. (BF16 on the wire is plain uint16_t.)
struct Bf16 {
  uint16_t bits;
};

GW_HD uint32_t float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

GW_HD float bits_float(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

GW_HD bool is_finite(float x) {
  return (float_bits(x) & 0x7f800000u) != 0x7f800000u;
}

GW_HD float bf16_to_float(uint16_t b) {
  return bits_float(static_cast<uint32_t>(b) << 16);
}

namespace detail {
// Returns the upper half of the rounded word. `rounded`: magnitude and sign after the increment; `x`: the
// word before the increment.
GW_HD uint16_t bf16_finish(uint32_t x, uint32_t rounded) {
  if ((x & 0x7f800000u) == 0x7f800000u) {  // Inf stays Inf, NaN stays NaN
    uint16_t top = static_cast<uint16_t>(x >> 16);
    return (x & 0x007fffffu) ? static_cast<uint16_t>(top | 0x0040u) : top;
  }
  uint16_t top = static_cast<uint16_t>(rounded >> 16);
  return (top & 0x7f80u) == 0x7f80u ? static_cast<uint16_t>(top - 1) : top;  // saturate at the largest finite
}
}  // namespace detail

// Rounds to nearest, ties to even.
GW_HD uint16_t float_to_bf16_nearest(float value) {
  uint32_t x = float_bits(value);
  return detail::bf16_finish(x, x + 0x7fffu + ((x >> 16) & 1u));
}

// Rounds up in magnitude with probability equal to the discarded fraction; `random` supplies 16 uniform bits.
// The expected value of the result is `value` (away from saturation).
GW_HD uint16_t float_to_bf16_stochastic(float value, uint32_t random) {
  uint32_t x = float_bits(value);
  return detail::bf16_finish(x, x + (random & 0xffffu));
}

// Load and store operands in kernels written once for FP32 and BF16 operands; all arithmetic is FP32.
GW_HD float widen(float x) {
  return x;
}
GW_HD float widen(Bf16 x) {
  return bf16_to_float(x.bits);
}

// Rounds to nearest, ties to even, as matrix products do: values beyond the largest finite BF16 become
// infinity.
template <typename T>
GW_HD T narrow(float x);
template <>
GW_HD float narrow<float>(float x) {
  return x;
}
template <>
GW_HD Bf16 narrow<Bf16>(float value) {
  uint32_t x = float_bits(value);
  uint32_t rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
  uint32_t nan = (x >> 16) | 0x0040u;
  return {static_cast<uint16_t>((x & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
}

// A format with kMantissa bits of mantissa, exponent bias kBias and magnitudes up to code kMaxCode; larger
// values saturate. Codes exclude the sign. The format has no infinity; the caller handles NaN.
template <int kMantissa, int kBias, uint32_t kMaxCode>
struct SmallFloat {
  static constexpr int kDropped = 23 - kMantissa;  // bits of a float's mantissa
  static constexpr uint32_t kMin = static_cast<uint32_t>(128 - kBias)
                                   << 23;            // the least normal number, as a float
  static constexpr uint32_t kOne = 1u << kMantissa;  // the code of the least normal number

  GW_HD static float most() { return bits_float((kMaxCode << kDropped) + kMin - (1u << 23)); }

  // Rounds |x| to nearest, ties to even.
  GW_HD static uint32_t nearest(float x) {
    const float magnitude = clamped(x);
    const uint32_t exponent = float_bits(magnitude) & 0x7f800000u;
    const uint32_t binade = exponent > kMin ? exponent : kMin;
    // A float whose unit in the last place is this binade's quantum: adding it rounds.
    const uint32_t large = binade + (static_cast<uint32_t>(kDropped) << 23);
    const uint32_t quanta = float_bits(magnitude + bits_float(large)) - large;
    return quanta + ((binade - kMin) >> kDropped);
  }
  // Rounds |x| up with probability (discarded fraction), by 16 random bits.
  GW_HD static uint32_t stochastic(float x, uint32_t random) {
    const float magnitude = clamped(x), least = bits_float(kMin);
    // Below the least normal number the quanta are as large as just above it, so such values are rounded
    // there.
    const bool low = magnitude < least;
    const uint32_t bits = float_bits(magnitude + (low ? least : 0.0f));
    const uint32_t code = (bits + (random << (kDropped - 16))) >> kDropped;
    return code - ((kMin >> kDropped) - kOne) - (low ? kOne : 0u);
  }
  GW_HD static float value(uint32_t code) {
    const float low = static_cast<float>(code) * (bits_float(kMin) / static_cast<float>(kOne));
    return code < kOne ? low : bits_float((code << kDropped) + kMin - (1u << 23));
  }

 private:
  // Clamps the magnitude on integers, whose minimum and maximum are one instruction each.
  GW_HD static float clamped(float x) {
    const uint32_t magnitude = float_bits(x) & 0x7fffffffu, largest = float_bits(most());
    return bits_float(magnitude < largest ? magnitude : largest);
  }
};

// FP32 <-> FP8 E4M3, and the power-of-two scale of a block, the same on host and device: by the conversion
// instructions of GPUs from sm_89 on, elsewhere by arithmetic.
//
// E4M3 as in OCP's "8-bit Floating Point Specification": sign, 4 bits of exponent with bias 7, 3 of mantissa;
// largest finite 448, smallest normal 2^-6, quantum below that 2^-9; no infinity; 0x7f and 0xff are NaN.
//
// A block's scale is a power of two, 2^k with k from -126 to 119, stored as the byte k + 127 (OCP
// Microscaling's E8M0). Scaling is therefore exact, E4M3's exponent covers the remaining range, and a scale
// is never zero.

inline constexpr int kFp8Block = 128;  // values that share a scale

using E4M3 = SmallFloat<3, 7, 0x7e>;

template <bool kFinite = false>
GW_HD float e4m3_to_float(uint32_t code) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t halves;  // FP16 holds all of E4M3
  float value;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(code)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(halves)));
  return value;
#else
  const uint32_t magnitude = code & 0x7fu;
  const float value = !kFinite && magnitude == 0x7fu ? bits_float(0x7fc00000u) : E4M3::value(magnitude);
  return bits_float(float_bits(value) | (code & 0x80u) << 24);
#endif
}

// Decodes four codes.
GW_HD void e4m3x4_to_floats(uint32_t word, float* x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("{.reg .b16 low, high, a, b, c, d; .reg .b32 ab, cd; mov.b32 {low, high}, %4;"
      "cvt.rn.f16x2.e4m3x2 ab, low; cvt.rn.f16x2.e4m3x2 cd, high;"  // without shifts
      "mov.b32 {a, b}, ab; mov.b32 {c, d}, cd;"
      "cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; cvt.f32.f16 %2, c; cvt.f32.f16 %3, d;}"
      : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
      : "r"(word));
#else
  for (int k = 0; k < 4; ++k) x[k] = e4m3_to_float(word >> (8 * k) & 0xffu);
#endif
}

// Returns the code of a finite value without its sign, rounded to nearest, ties to even; saturates.
GW_HD uint32_t e4m3_magnitude(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
  return pair & 0x7fu;
#else
  return E4M3::nearest(value);
#endif
}

// Returns the code of a value. Saturates at 448; Inf and NaN become NaN, unless kFinite excludes them. Rounds
// to nearest, ties to even, if `random` is negative; otherwise rounds up in magnitude with probability equal
// to the discarded fraction, by the 16 bits of `random`.
template <bool kFinite>
GW_HD uint32_t float_to_e4m3(float value, int32_t random) {
  const uint32_t rounded =
      random < 0 ? e4m3_magnitude(value) : E4M3::stochastic(value, static_cast<uint32_t>(random));
  const uint32_t code = kFinite || is_finite(value) ? rounded : 0x7fu;
  return code | ((float_bits(value) >> 24) & 0x80u);
}
GW_HD uint8_t float_to_e4m3_nearest(float value) {
  return static_cast<uint8_t>(float_to_e4m3<false>(value, -1));
}
GW_HD uint8_t float_to_e4m3_stochastic(float value, uint32_t random) {
  return static_cast<uint8_t>(float_to_e4m3<false>(value, static_cast<int32_t>(random & 0xffffu)));
}

// Returns the codes of four finite values, rounded to nearest, ties to even; saturates. `cvt` does the same:
// .rn rounds to nearest even, also to E4M3's subnormal numbers, .satfinite sends larger magnitudes to 448,
// and the sign remains, also of 0. (It would send Inf to 448, and NaN to 0x7f.)
GW_HD uint32_t floats_to_e4m3x4(const float* x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
  return low | static_cast<uint32_t>(high) << 16;
#else
  uint32_t word = 0;
  for (int k = 0; k < 4; ++k) word |= float_to_e4m3<true>(x[k], -1) << (8 * k);
  return word;
#endif
}

// Rounds a value of at most 448 to a value of E4M3 at random, as E4M3::stochastic().
GW_HD float e4m3_stochastic(float x, uint32_t random) {
  // Values below the least normal number have its quanta, so they are rounded as a sum with it.
  const float least = bits_float(E4M3::kMin), base = fabsf(x) < least ? copysignf(least, x) : 0.0f;
  const uint32_t rounded = float_bits(x + base) + random * (1u << (E4M3::kDropped - 16));
  const float value = bits_float(rounded & ~((1u << E4M3::kDropped) - 1u)) - base;
  return copysignf(value, x);
}

// Returns the scale byte for a block whose largest finite magnitude is `largest`, given as its bits: the
// least k with largest <= 448 * 2^k = 1.75 * 2^(k + 8).
GW_HD uint8_t fp8_scale_byte(uint32_t largest_bits) {
  int32_t byte = static_cast<int32_t>((largest_bits + 0x1fffffu) >> 23) - 8;  // rounds 1.75 down
  byte = byte > 246 ? 246 : byte;  // 448 * 2^120 overflows a float: values above 1.75 * 2^127 saturate
  return static_cast<uint8_t>(byte < 1 ? 1 : byte);
}
GW_HD float fp8_scale(uint8_t byte) {
  return bits_float(static_cast<uint32_t>(byte) << 23);
}
GW_HD float fp8_inverse_scale(uint8_t byte) {
  return bits_float((254u - byte) << 23);
}

// The largest magnitude of a block that is not clamped, 448 * 2^119, as bits.
inline constexpr uint32_t kFp8MostBits = 0x7f600000u;

// Returns the magnitude bits of x if it is finite, else 0: the operand of a block's maximum.
GW_HD uint32_t finite_magnitude_bits(float x) {
  uint32_t magnitude = float_bits(x) & 0x7fffffffu;
  return magnitude < 0x7f800000u ? magnitude : 0u;
}

// Returns the largest magnitude of some values, as bits; at least 0x7f800000 if a value is NaN or Inf.
template <int N>
GW_HD uint32_t largest_magnitude(const float (&x)[N]) {
  uint32_t largest = float_bits(x[0]) & 0x7fffffffu;
  for (int k = 1; k < N; ++k) {
#ifdef __CUDA_ARCH__  // the absolute value is part of the instruction; NaN stays
    asm("{.reg .f32 y; abs.f32 y, %1; max.NaN.f32 %0, %0, y;}" : "+r"(largest) : "f"(x[k]));
#else
    const uint32_t magnitude = float_bits(x[k]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
#endif
  }
  return largest;
}

// Returns the smaller of two numbers; NaN if x is NaN.
GW_HD float at_most(float x, float most) {
#ifdef __CUDA_ARCH__
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(most));
  return x;
#else
  return x > most ? most : x;
#endif
}

// FP32 <-> FP16 (IEEE 754 binary16) by integer arithmetic, the same on host and device and without branches.

GW_HD float fp16_to_float(uint16_t half) {
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fffu) << 13;
  const uint32_t exponent = magnitude & 0x0f800000u;
  const float small = bits_float(magnitude + (113u << 23)) - 0x1p-14f;  // 0 and denormals
  uint32_t bits = magnitude + (112u << 23);
  bits = exponent == 0x0f800000u ? bits + (112u << 23) : bits;  // Inf and NaN
  bits = exponent == 0u ? float_bits(small) : bits;
  return bits_float(bits | static_cast<uint32_t>(half & 0x8000u) << 16);
}

// Rounds to nearest, ties to even. From 65520 on the result is infinity, so that FP16 training with loss
// scaling detects overflow.
GW_HD uint16_t float_to_fp16(float value) {
  const uint32_t word = float_bits(value), magnitude = word & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // One addition rounds to multiples of 2^-24, the denormals' unit.
  const uint32_t small =
      float_bits(bits_float(magnitude < (113u << 23) ? magnitude : 0u) + 0.5f) - 0x3f000000u;
  uint32_t half = magnitude < (113u << 23) ? small : normal;
  half = magnitude >= 0x47800000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return static_cast<uint16_t>(half | (word >> 16 & 0x8000u));
}

}  // namespace gradwire
