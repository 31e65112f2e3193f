// FP32 <-> FP8 E4M3 by bit arithmetic, and the power-of-two scale of a block, the same on host and device.
//
// E4M3 as in OCP's "8-bit Floating Point Specification": sign, 4 bits of exponent with bias 7, 3 of mantissa;
// largest finite 448, smallest normal 2^-6, quantum below that 2^-9; no infinity; 0x7f and 0xff are NaN.
//
// A block's scale is a power of two, 2^k with k from -126 to 119, stored as the byte k + 127 (OCP
// Microscaling's E8M0). So scaling is exact, E4M3's own exponent does the rest, and a scale is never zero.
#pragma once

#include <cstdint>

#include "kernels/math/bf16.h"

namespace gradwire {

inline constexpr int kFp8Block = 128;  // values that share a scale

GW_HD float e4m3_to_float(uint8_t code) {
  uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  uint32_t magnitude = code & 0x7fu;
  float subnormal = static_cast<float>(magnitude) * (1.0f / 512.0f);
  uint32_t bits = magnitude < 8 ? float_bits(subnormal) : (magnitude << 20) + (120u << 23);
  if (magnitude == 0x7fu) bits = 0x7fc00000u;
  return bits_float(bits | sign);
}

namespace detail {
// Rounds to nearest-even if `random` is negative; else up with probability (discarded fraction), by its bits.
GW_HD uint8_t to_e4m3(float value, int32_t random) {
  uint32_t x = float_bits(value);
  uint32_t sign = (x >> 24) & 0x80u;
  x &= 0x7fffffffu;
  if (x > 0x7f800000u - 1)
    return static_cast<uint8_t>(sign | 0x7fu);  // NaN, and Inf, which has no code of its own
  uint32_t magnitude;
  if (x < 0x3c800000u) {  // below 2^-6: multiples of 2^-9, found by adding them to a float whose ulp is 1
    float quanta = bits_float(x) * 512.0f;
    if (random < 0) {
      magnitude = float_bits(quanta + 8388608.0f) - 0x4b000000u;
    } else {
      magnitude = static_cast<uint32_t>(quanta + static_cast<float>(random) * (1.0f / 65536.0f));
    }
  } else {
    uint32_t up = random < 0 ? 0x7ffffu + ((x >> 20) & 1u) : static_cast<uint32_t>(random) << 4;
    magnitude = ((x + up) >> 20) - 960u;
    magnitude = magnitude > 0x7eu ? 0x7eu : magnitude;
  }
  return static_cast<uint8_t>(sign | magnitude);
}
}  // namespace detail

// Round to nearest, ties to even. Saturates at 448; Inf and NaN become NaN.
GW_HD uint8_t float_to_e4m3_nearest(float value) {
  return detail::to_e4m3(value, -1);
}

// Round up in magnitude with probability equal to the discarded fraction; `random` supplies 16 uniform bits.
GW_HD uint8_t float_to_e4m3_stochastic(float value, uint32_t random) {
  return detail::to_e4m3(value, static_cast<int32_t>(random & 0xffffu));
}

// The scale byte for a block whose largest finite magnitude is `largest` (given as its bits, which order as
// it does): the least k with largest <= 448 * 2^k = 1.75 * 2^(k + 8).
GW_HD uint8_t fp8_scale_byte(uint32_t largest_bits) {
  int32_t exponent = static_cast<int32_t>(largest_bits >> 23);
  int32_t byte = exponent - 8 + ((largest_bits & 0x7fffffu) > 0x600000u ? 1 : 0);
  byte = byte > 246 ? 246 : byte;  // 448 * 2^120 is no float: values above 1.75 * 2^127 saturate instead
  return static_cast<uint8_t>(byte < 1 ? 1 : byte);
}
GW_HD float fp8_scale(uint8_t byte) {
  return bits_float(static_cast<uint32_t>(byte) << 23);
}
GW_HD float fp8_inverse_scale(uint8_t byte) {
  return bits_float((254u - byte) << 23);
}

// Magnitude bits of x if it is finite, else 0: what enters a block's maximum.
GW_HD uint32_t finite_magnitude_bits(float x) {
  uint32_t magnitude = float_bits(x) & 0x7fffffffu;
  return magnitude < 0x7f800000u ? magnitude : 0u;
}

}  // namespace gradwire
