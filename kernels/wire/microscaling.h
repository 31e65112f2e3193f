// OCP's Microscaling formats: 32 small floats and a power of two, its exponent + 127 in a byte (E8M0), and NVIDIA's
// NVFP4: 16 of them share an E4M3 scale, and here 8 such groups a power of two.
//
//   mxfp8  E4M3, 8.25 bits a value     mxfp6  E2M3, 6.25     mxfp4  E2M1, 4.25     nvfp4  E2M1, 4.5625
//
// The power of two is the least with which nothing is cut off (OCP's own rule, floor, cuts the largest values,
// which error feedback would have to send again). E2M3 and E2M1 have no NaN: in mxfp4, mxfp6 and nvfp4, NaN
// and Inf make their group NaN by its scale; see kWholeBlockNan.
#pragma once

#include "kernels/math/fp8.h"
#include "kernels/wire/block.h"
#include "kernels/wire/codes.h"

namespace gradwire {

// A small float: a sign, 2 bits of exponent with bias 1, kMantissa bits, as magnitudes in quanta of 2^-kMantissa.
template <int kMantissa>
struct Mini {
  static constexpr uint32_t kMagnitudes = 4u << kMantissa;
  static constexpr float kMost = kMantissa == 1 ? 6.0f : 7.5f;

  // The magnitude's code: rounded where its binade's quantum is 1, 2 or 4 quanta of the lowest one.
  GW_HD static uint32_t code_of(float x, int32_t random) {
    constexpr float one = 1u << kMantissa;
    const float magnitude = bits_float(float_bits(x) & 0x7fffffffu);
    const float quanta = (magnitude < kMost ? magnitude : kMost) * one;
    const int shift = quanta >= 4.0f * one ? 2 : quanta >= 2.0f * one ? 1 : 0;
    const float coarse = quanta * (shift == 2 ? 0.25f : shift == 1 ? 0.5f : 1.0f);
    const uint32_t rounded = round_magnitude(coarse, random);  // may reach the next binade's first
    const uint32_t code = rounded + (static_cast<uint32_t>(shift) << kMantissa);
    return code | (float_bits(x) >> 31) * kMagnitudes;
  }
  GW_HD static float value_of(uint32_t code) {
    const uint32_t magnitude = code & (kMagnitudes - 1u), exponent = magnitude >> kMantissa;
    const uint32_t mantissa = magnitude & ((1u << kMantissa) - 1u);
    const uint32_t quanta = exponent == 0 ? mantissa : (mantissa | (1u << kMantissa)) << (exponent - 1u);
    const float value = static_cast<float>(quanta) * (1.0f / static_cast<float>(1u << kMantissa));
    return code >= kMagnitudes ? -value : value;
  }
};

// The least k, as k + 127, with largest <= most * 2^k, for `most` = (1 + fraction) * 2^exponent. Its inverse is a
// normal number.
GW_HD uint8_t e8m0_for(uint32_t largest_bits, int exponent, float fraction) {
  const auto part = static_cast<float>(largest_bits & 0x7fffffu) * (1.0f / 8388608.0f);
  int32_t byte = static_cast<int32_t>(largest_bits >> 23) - exponent + (part > fraction ? 1 : 0);
  byte = byte > 253 - exponent ? 253 - exponent : byte;
  return static_cast<uint8_t>(byte < 1 ? 1 : byte);
}
inline constexpr uint8_t kE8M0Nan = 255;

struct MxFp8 {
  static constexpr int kMaxBlock = 32;
  static constexpr const char* kSummary = "E4M3 with a power-of-two scale per 32 values";
  static constexpr const char* kSource = "OCP Microscaling Formats (MX) Specification, 2023";
  static constexpr Rounding kRounding = Rounding::nearest;
  static constexpr bool kStochastic = true, kWholeBlockNan = false;
  static constexpr Rotation kRotation = Rotation::optional;
  static constexpr std::array<const char*, 0> kExamples = {};

  GW_HD static int block() { return 32; }
  GW_HD static int bytes() { return 33; }
  static double gaussian_error(bool rotated) { return rotated ? 0 : 7.0e-4; }
  static std::vector<FormatOption> options() { return {}; }

  template <typename Lanes>
  GW_HD void encode(const Lanes& lanes, const float* values, int count, const uint16_t* random,
                    uint8_t* to) const {
    const uint8_t scale = fp8_scale_byte(
        lanes.max(count, [=](int i) GW_HD_LAMBDA { return finite_magnitude_bits(values[i]); }));
    const float inverse = fp8_inverse_scale(scale);
    to[32] = scale;
    lanes.each(32, [=](int i) GW_HD_LAMBDA {
      const float x = values[i] * inverse;
      to[i] = random == nullptr ? float_to_e4m3_nearest(x) : float_to_e4m3_stochastic(x, random[i]);
    });
  }
  template <typename Lanes, typename Values>
  GW_HD void decode(const Lanes& lanes, const uint8_t* from, int count, Values values) const {
    const float scale = fp8_scale(from[32]);
    lanes.each(count, [=](int i) GW_HD_LAMBDA { values[i] = scale * e4m3_to_float(from[i]); });
  }
};

template <int kMantissa>
struct MxMini {
  using Float = Mini<kMantissa>;
  static constexpr int kBits = 3 + kMantissa, kMaxBlock = 32, kCodes = 32 * kBits / 8;
  static constexpr const char* kSummary = kMantissa == 1 ? "E2M1 with a power-of-two scale per 32 values"
                                                         : "E2M3 with a power-of-two scale per 32 values";
  static constexpr const char* kSource = "OCP Microscaling Formats (MX) Specification, 2023";
  static constexpr Rounding kRounding = Rounding::nearest;
  static constexpr bool kStochastic = true, kWholeBlockNan = true;
  static constexpr Rotation kRotation = Rotation::optional;
  static constexpr std::array<const char*, 0> kExamples = {};

  GW_HD static int block() { return 32; }
  GW_HD static int bytes() { return kCodes + 1; }
  static double gaussian_error(bool rotated) { return rotated ? 0 : kMantissa == 1 ? 1.3e-2 : 7.7e-4; }
  static std::vector<FormatOption> options() { return {}; }

  template <typename Lanes>
  GW_HD void encode(const Lanes& lanes, const float* values, int count, const uint16_t* random,
                    uint8_t* to) const {
    const uint32_t largest =
        lanes.max(count, [=](int i) GW_HD_LAMBDA { return float_bits(values[i]) & 0x7fffffffu; });
    constexpr float fraction = kMantissa == 1 ? 0.5f : 0.875f;  // 6 = 1.5 * 4, 7.5 = 1.875 * 4
    const uint8_t scale = largest >= 0x7f800000u ? kE8M0Nan : e8m0_for(largest, 2, fraction);
    const float inverse = scale == kE8M0Nan ? 0.0f : fp8_inverse_scale(scale);
    to[kCodes] = scale;
    pack_codes<kBits>(lanes, 32, to, [=](int i) GW_HD_LAMBDA {
      return Float::code_of(scale == kE8M0Nan ? 0.0f : values[i] * inverse, draw_of(random, i));
    });
  }
  template <typename Lanes, typename Values>
  GW_HD void decode(const Lanes& lanes, const uint8_t* from, int count, Values values) const {
    const float scale = from[kCodes] == kE8M0Nan ? bits_float(0x7fc00000u) : fp8_scale(from[kCodes]);
    unpack_codes<kBits>(lanes, from, 32, count, [=](int i, uint32_t code) GW_HD_LAMBDA {
      values[i] = scale * Float::value_of(code);
    });
  }
};
using MxFp6 = MxMini<3>;
using MxFp4 = MxMini<1>;

// 128 values: their codes, 8 E4M3 scales, one power of two.
struct NvFp4 {
  using Float = Mini<1>;
  static constexpr int kMaxBlock = 128, kGroup = 16, kGroups = 8;
  static constexpr const char* kSummary = "E2M1 with an E4M3 scale per 16 values and a power of two per 128";
  static constexpr const char* kSource = "NVIDIA, Pretraining Large Language Models with NVFP4, 2025";
  static constexpr Rounding kRounding = Rounding::nearest;
  static constexpr bool kStochastic = true, kWholeBlockNan = true;
  static constexpr Rotation kRotation = Rotation::optional;
  static constexpr std::array<const char*, 0> kExamples = {};

  GW_HD static int block() { return 128; }
  GW_HD static int bytes() { return 64 + kGroups + 1; }
  static double gaussian_error(bool) { return 9.0e-3; }
  static std::vector<FormatOption> options() { return {}; }

  template <typename Lanes>
  GW_HD void encode(const Lanes& lanes, const float* values, int count, const uint16_t* random,
                    uint8_t* to) const {
    const uint32_t largest =
        lanes.max(count, [=](int i) GW_HD_LAMBDA { return float_bits(values[i]) & 0x7fffffffu; });
    // 6 * 256 = 1.5 * 2^10: with the largest group's scale at most 256, so that rounding it up stays legal.
    const uint8_t unit = largest >= 0x7f800000u ? kE8M0Nan : e8m0_for(largest, 10, 0.5f);
    const float down = unit == kE8M0Nan ? 0.0f : fp8_inverse_scale(unit);
    uint8_t* const scales = to + 64;
    scales[kGroups] = unit;
    lanes.each(kGroups, [=](int g) GW_HD_LAMBDA {
      uint32_t most = 0;
      for (int i = 0; i < kGroup; ++i) {
        const uint32_t x = finite_magnitude_bits(values[kGroup * g + i]);
        most = x > most ? x : most;
      }
      scales[g] = float_to_e4m3_nearest(bits_float(most) * down * (1.0f / 6.0f));
    });
    pack_codes<4>(lanes, 128, to, [=](int i) GW_HD_LAMBDA {
      const float scale = e4m3_to_float(scales[i / kGroup]);
      const float x = scale > 0.0f && unit != kE8M0Nan ? values[i] * down / scale : 0.0f;
      return Float::code_of(x, draw_of(random, i));
    });
  }
  template <typename Lanes, typename Values>
  GW_HD void decode(const Lanes& lanes, const uint8_t* from, int count, Values values) const {
    const uint8_t* const scales = from + 64;
    const float unit = scales[kGroups] == kE8M0Nan ? bits_float(0x7fc00000u) : fp8_scale(scales[kGroups]);
    unpack_codes<4>(lanes, from, 128, count, [=](int i, uint32_t code) GW_HD_LAMBDA {
      values[i] = unit * (e4m3_to_float(scales[i / kGroup]) * Float::value_of(code));
    });
  }
};

}  // namespace gradwire
