// FP32 <-> FP16 (IEEE 754 binary16) by integer arithmetic, the same on host and device and without branches.
#pragma once

#include <cstdint>

#include "kernels/math/bf16.h"

namespace gradwire {

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
