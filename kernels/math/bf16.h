// FP32 <-> BF16 by bit arithmetic, the same on host and device.
//
// Rounding keeps two promises that the wire needs: a finite value never becomes infinite (it saturates at the
// largest finite BF16, 3.3895e38, and error feedback keeps the rest), and a NaN stays a NaN.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/math/hd.h"

namespace gradwire {

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

}  // namespace gradwire
