// 8-bit integers on the wire: each block of 128 values as codes from -127 to 127 in units of a power of two,
// whose exponent is the block's last byte (k + 127, as OCP Microscaling's E8M0).
//
// wire + residual == S exactly with round to nearest, to FP32 rounding with stochastic. NaN and Inf both
// travel as NaN, code -128; they do not touch the unit.
#pragma once

#include "kernels/math/fp8.h"
#include "kernels/wire/block.h"

namespace gradwire {

struct Int8 {
  static constexpr int kBlock = 128, kBytes = kBlock + 1;
  static constexpr const char* kSummary = "8-bit integers, a power-of-two unit per 128 values";
  static constexpr const char* kSource = "MXINT8 of OCP's Microscaling Formats, in larger blocks";
  static constexpr bool kStochastic = true;
  static constexpr double kGaussianError = 8.34e-5;

  // The least k, as k + 127, with largest <= 127 * 2^k = 1.984375 * 2^(k + 6). With k = 122, code 64 would be
  // no float: values above 127 * 2^121 saturate instead.
  GW_HD static uint8_t unit_byte(uint32_t largest_bits) {
    int32_t byte = static_cast<int32_t>(largest_bits >> 23) - 6 + ((largest_bits & 0x7fffffu) > 0x7e0000u);
    byte = byte > 248 ? 248 : byte;
    return static_cast<uint8_t>(byte < 1 ? 1 : byte);
  }

  // Of a number of units. 16 random bits, or a negative number: to nearest, ties to even.
  GW_HD static uint8_t code_of(float units, int32_t random) {
    if (!is_finite(units)) return 0x80;
    const float magnitude = units < 0.0f ? -units : units;
    // A float of 2^23 has units of 1: adding 2^23 rounds to nearest.
    int32_t code = random < 0
                       ? static_cast<int32_t>(float_bits(magnitude + 8388608.0f) - 0x4b000000u)
                       : static_cast<int32_t>(magnitude + static_cast<float>(random) * (1.0f / 65536.0f));
    code = code > 127 ? 127 : code;
    return static_cast<uint8_t>(units < 0.0f ? -code : code);
  }

  template <typename Lanes>
  GW_HD static void encode(const Lanes& lanes, const float* values, int count, const uint16_t* random,
                           uint8_t* bytes) {
    const uint8_t unit =
        unit_byte(lanes.max(count, [=](int i) GW_HD_LAMBDA { return finite_magnitude_bits(values[i]); }));
    const float inverse = fp8_inverse_scale(unit);
    bytes[kBlock] = unit;
    if (random == nullptr) {
      lanes.each(kBlock, [=](int i) GW_HD_LAMBDA { bytes[i] = code_of(values[i] * inverse, -1); });
    } else {
      lanes.each(kBlock, [=](int i) GW_HD_LAMBDA { bytes[i] = code_of(values[i] * inverse, random[i]); });
    }
  }

  template <typename Lanes, typename Values>
  GW_HD static void decode(const Lanes& lanes, const uint8_t* bytes, int count, Values values) {
    const float unit = fp8_scale(bytes[kBlock]);
    lanes.each(count, [=](int i) GW_HD_LAMBDA {
      values[i] = bytes[i] == 0x80 ? bits_float(0x7fc00000u)
                                   : unit * static_cast<float>(static_cast<int8_t>(bytes[i]));
    });
  }
};

}  // namespace gradwire
