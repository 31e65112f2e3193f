// FP32 <-> BF16 by bit arithmetic, the same on host and device.
//
// Rounding keeps two promises the wire needs: a finite value never becomes infinite (it saturates at the
// largest finite BF16, 3.3895e38, and error feedback keeps the rest), and a NaN stays a NaN.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/math/hd.h"

namespace gradwire {

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
// `rounded` is the magnitude-and-sign word after the increment; `x` the word before it.
GW_HD uint16_t bf16_finish(uint32_t x, uint32_t rounded) {
  if ((x & 0x7f800000u) == 0x7f800000u) {  // Inf or NaN: keep, and keep a NaN a NaN
    uint16_t top = static_cast<uint16_t>(x >> 16);
    return (x & 0x007fffffu) ? static_cast<uint16_t>(top | 0x0040u) : top;
  }
  uint16_t top = static_cast<uint16_t>(rounded >> 16);
  return (top & 0x7f80u) == 0x7f80u ? static_cast<uint16_t>(top - 1) : top;  // saturate at the largest finite
}
}  // namespace detail

// Round to nearest, ties to even.
GW_HD uint16_t float_to_bf16_nearest(float value) {
  uint32_t x = float_bits(value);
  return detail::bf16_finish(x, x + 0x7fffu + ((x >> 16) & 1u));
}

// Round up in magnitude with probability equal to the discarded fraction; `random` supplies 16 uniform bits.
// The expected value of the result is `value` (away from saturation).
GW_HD uint16_t float_to_bf16_stochastic(float value, uint32_t random) {
  uint32_t x = float_bits(value);
  return detail::bf16_finish(x, x + (random & 0xffffu));
}

}  // namespace gradwire
