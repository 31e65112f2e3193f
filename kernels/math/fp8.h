// FP32 <-> FP8 E4M3, and the power-of-two scale of a block, the same on host and device: by the conversion
// instructions of GPUs from sm_89 on, elsewhere by arithmetic.
//
// E4M3 as in OCP's "8-bit Floating Point Specification": sign, 4 bits of exponent with bias 7, 3 of mantissa;
// largest finite 448, smallest normal 2^-6, quantum below that 2^-9; no infinity; 0x7f and 0xff are NaN.
//
// A block's scale is a power of two, 2^k with k from -126 to 119, stored as the byte k + 127 (OCP
// Microscaling's E8M0). Scaling is therefore exact, E4M3's exponent covers the remaining range, and a scale
// is never zero.
#pragma once

#include <cstdint>

#include "kernels/math/bf16.h"
#include "kernels/math/small_float.h"

namespace gradwire {

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

// Returns the scale byte for a block whose largest finite magnitude is `largest`, given as its bits: the
// least k with largest <= 448 * 2^k = 1.75 * 2^(k + 8).
GW_HD uint8_t fp8_scale_byte(uint32_t largest_bits) {
  int32_t exponent = static_cast<int32_t>(largest_bits >> 23);
  int32_t byte = exponent - 8 + ((largest_bits & 0x7fffffu) > 0x600000u ? 1 : 0);
  byte = byte > 246 ? 246 : byte;  // 448 * 2^120 overflows a float: values above 1.75 * 2^127 saturate
  return static_cast<uint8_t>(byte < 1 ? 1 : byte);
}
GW_HD float fp8_scale(uint8_t byte) {
  return bits_float(static_cast<uint32_t>(byte) << 23);
}
GW_HD float fp8_inverse_scale(uint8_t byte) {
  return bits_float((254u - byte) << 23);
}

// Returns the magnitude bits of x if it is finite, else 0: the operand of a block's maximum.
GW_HD uint32_t finite_magnitude_bits(float x) {
  uint32_t magnitude = float_bits(x) & 0x7fffffffu;
  return magnitude < 0x7f800000u ? magnitude : 0u;
}

}  // namespace gradwire
