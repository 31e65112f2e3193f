// OCP's Microscaling formats: 32 small floats share a power of two, stored as its exponent + 127 in a byte
// (E8M0). NVIDIA's NVFP4: 16 small floats share an E4M3 scale; in this implementation 8 such groups share a
// power of two.
//
//   mxfp8  E4M3, 8.25 bits a value     mxfp6  E2M3, 6.25     mxfp4  E2M1, 4.25     nvfp4  E2M1, 4.5625
//
// The power of two is the least power that does not clamp any value. (OCP's rule, floor, clamps the largest
// values. Error feedback would have to send the clamped parts again.) E2M3 and E2M1 have no NaN: in mxfp4,
// mxfp6 and nvfp4, NaN and Inf make their group NaN by its scale; see kMasks.
#pragma once

#include "kernels/math/small_float.h"
#include "kernels/wire/block.h"
#include "kernels/wire/codes.h"

namespace gradwire {

// The codes of E2M3 and E2M1, with the sign bit above the magnitude.
template <int kMantissa>
struct Mini {
  static constexpr uint32_t kSign = 4u << kMantissa;
  using Magnitude = SmallFloat<kMantissa, 1, kSign - 1u>;

  GW_HD static uint32_t code_of(float x, int32_t random) {
    const uint32_t code =
        random < 0 ? Magnitude::nearest(x) : Magnitude::stochastic(x, static_cast<uint32_t>(random));
    return code | (float_bits(x) >> 31) * kSign;
  }
  GW_HD static float value_of(uint32_t code) {
    return bits_float(float_bits(Magnitude::value(code & (kSign - 1u))) | (code & kSign) << (29 - kMantissa));
  }
  // Decodes the four bytes of each word, divided by 64: as E4M3, whose exponent has the bias 7 in place of 1.
  template <int kWords>
  GW_HD void operator()(const uint32_t (&words)[kWords], float* x) const {
    constexpr uint32_t kEach = 0x01010101u;
    for (const uint32_t codes : words) {
      e4m3x4_to_floats((codes << (3 - kMantissa) & ((kSign - 1u) << (3 - kMantissa)) * kEach) |
                           (codes << (5 - kMantissa) & 0x80u * kEach),
                       x);
      x += 4;
    }
  }
};

// Returns the least k, as k + 127, with largest <= most * 2^k, for `most` = (1 + fraction) * 2^exponent. The
// inverse of 2^k is a normal number.
GW_HD uint8_t e8m0_for(uint32_t largest_bits, int exponent, float fraction) {
  const auto part = static_cast<float>(largest_bits & 0x7fffffu) * (1.0f / 8388608.0f);
  int32_t byte = static_cast<int32_t>(largest_bits >> 23) - exponent + (part > fraction ? 1 : 0);
  byte = byte > 253 - exponent ? 253 - exponent : byte;
  return static_cast<uint8_t>(byte < 1 ? 1 : byte);
}

// Returns WireFormat::error_bound() of floats with this many bits of mantissa: a step is at most the
// magnitude times 2^-mantissa.
inline double small_float_bound(int mantissa, bool stochastic, double scale_error = 0) {
  const double step = 1.0 / (1 << (stochastic ? mantissa : mantissa + 1)) + scale_error;
  return step * step;
}

struct MxFp8 {
  static constexpr int kMaxBlock = 32;
  static constexpr const char* kSummary = "E4M3 with a power-of-two scale per 32 values";
  static constexpr const char* kSource = "OCP Microscaling Formats (MX) Specification, 2023";
  static constexpr Rounding kRounding = Rounding::nearest;
  static constexpr bool kStochastic = true, kMasks = false;
  static constexpr Rotation kRotation = Rotation::optional;
  static constexpr std::array<const char*, 0> kExamples = {};

  GW_HD static int block() { return 32; }
  GW_HD static int bytes() { return 33; }
  GW_HD static int scale_bytes() { return 1; }
  static double error_bound(bool stochastic) { return small_float_bound(3, stochastic); }
  static double gaussian_error(bool rotated) { return rotated ? 0 : 7.0e-4; }
  static std::vector<FormatOption> options() { return {}; }

  template <typename Lanes, typename Values, typename Random, typename Sink = NoSink>
  GW_HD void encode(const Lanes& lanes, Values values, int count, Random random, uint8_t* to,
                    const Sink& sink = {}) const {
    to[32] = encode_e4m3(lanes, values, count, 32, random, to, sink);
  }
  template <typename Lanes, typename Values>
  GW_HD void decode(const Lanes& lanes, const uint8_t* from, int count, Values values) const {
    decode_e4m3(lanes, from, from[32], 32, count, values);
  }
  template <typename Lanes>
  GW_HD static void add(const Lanes& lanes, const uint8_t* from, float scale, float* sums) {
    add_e4m3(lanes, from, from[32], scale, sums);
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
  static constexpr bool kStochastic = true, kMasks = true;
  static constexpr Rotation kRotation = Rotation::optional;
  static constexpr std::array<const char*, 0> kExamples = {};

  GW_HD static int block() { return 32; }
  GW_HD static int bytes() { return kCodes + 1; }
  GW_HD static int scale_bytes() { return 1; }
  static double error_bound(bool stochastic) { return small_float_bound(kMantissa, stochastic); }
  static double gaussian_error(bool rotated) { return rotated ? 0 : kMantissa == 1 ? 1.3e-2 : 7.7e-4; }
  static std::vector<FormatOption> options() { return {}; }

  template <typename Lanes, typename Values, typename Random>
  GW_HD void encode(const Lanes& lanes, Values values, int count, Random random, uint8_t* to) const {
    const uint32_t largest = largest_bits(lanes, values, count);
    constexpr float fraction = kMantissa == 1 ? 0.5f : 0.875f;  // 6 = 1.5 * 4, 7.5 = 1.875 * 4
    const uint8_t scale = e8m0_for(largest, 2, fraction);
    const float inverse = fp8_inverse_scale(scale);
    to[kCodes] = scale;
    with_draws(random, [=](const auto& draw) GW_HD_LAMBDA {
      pack_codes<kBits>(lanes, 32, to,
                        [=](auto i) GW_HD_LAMBDA { return Float::code_of(values[i] * inverse, draw(i)); });
    });
  }
  template <typename Lanes, typename Values>
  GW_HD void decode(const Lanes& lanes, const uint8_t* from, int count, Values values) const {
    const float scale = fp8_scale(from[kCodes]);
    unpack_codes<kBits>(lanes, from, 32, count, [=](auto i, uint32_t code) GW_HD_LAMBDA {
      values[i] = scale * Float::value_of(code);
    });
  }
  template <typename Lanes>
  GW_HD static bool adds(const Lanes&, const uint8_t* from, float scale) {
    return has_exact_products(scale * 64.0f * fp8_scale(from[kCodes]));
  }
  template <typename Lanes>
  GW_HD static void add(const Lanes& lanes, const uint8_t* from, float scale, float* sums) {
    lanes.template add_fours<kBits>(from, scale * 64.0f * fp8_scale(from[kCodes]), sums, Float());
  }
};
using MxFp6 = MxMini<3>;
using MxFp4 = MxMini<1>;

// A block of 128 values: the codes, 8 E4M3 scales, one power of two.
struct NvFp4 {
  using Float = Mini<1>;
  static constexpr int kMaxBlock = 128, kGroup = 16, kGroups = 8;
  static constexpr const char* kSummary = "E2M1 with an E4M3 scale per 16 values and a power of two per 128";
  static constexpr const char* kSource = "NVIDIA, Pretraining Large Language Models with NVFP4, 2025";
  static constexpr Rounding kRounding = Rounding::nearest;
  static constexpr bool kStochastic = true, kMasks = true;
  static constexpr Rotation kRotation = Rotation::optional;
  static constexpr std::array<const char*, 0> kExamples = {};

  GW_HD static int block() { return 128; }
  GW_HD static int bytes() { return 64 + kGroups + 1; }
  GW_HD static int scale_bytes() { return 1; }
  static double error_bound(bool stochastic) { return small_float_bound(1, stochastic, 1.0 / 16); }
  static double gaussian_error(bool) { return 9.0e-3; }
  static std::vector<FormatOption> options() { return {}; }

  template <typename Lanes, typename Values, typename Random>
  GW_HD void encode(const Lanes& lanes, Values values, int count, Random random, uint8_t* to) const {
    const uint32_t largest = largest_bits(lanes, values, count);
    // 6 * 256 = 1.5 * 2^10: the largest group's scale is at most 256, so that a scale that is rounded up
    // stays in range.
    const uint8_t unit = e8m0_for(largest, 10, 0.5f);
    const float down = fp8_inverse_scale(unit);
    uint8_t* const scales = to + 64;
    scales[kGroups] = unit;
    if constexpr (requires { Lanes::kRows; }) {
      float up[Lanes::kRows];  // a lane's values of a row are in one group
      for (int row = 0; row < Lanes::kRows; ++row) {
        const uint8_t scale = scale_for(lanes.group_max(kGroup, row, values), down);
        up[row] = inverse(scale);
        scales[lanes.slot(4 * row) / kGroup] = scale;
      }
      with_draws(random, [&](const auto& draw) GW_HD_LAMBDA {
        pack_codes<4>(lanes, 128, to, [&](auto i) GW_HD_LAMBDA {
          return Float::code_of(values[i] * down * up[i.k / 4], draw(i));
        });
      });
    } else {
      encode_in_groups(lanes, values, random, down, to);
    }
  }
  template <typename Lanes, typename Values>
  GW_HD void decode(const Lanes& lanes, const uint8_t* from, int, Values values) const {
    const uint8_t* const scales = from + 64;
    const float unit = fp8_scale(scales[kGroups]);
    unpack_codes<4>(lanes, from, 128, 128, [=](auto i, uint32_t code) GW_HD_LAMBDA {
      values[i] = unit * (e4m3_to_float(scales[i / kGroup]) * Float::value_of(code));
    });
  }
  template <typename Lanes>
  GW_HD static bool adds(const Lanes&, const uint8_t* from, float scale) {
    return has_exact_products(scale * 64.0f * fp8_scale(from[64 + kGroups]));
  }
  template <typename Lanes>
  GW_HD static void add(const Lanes& lanes, const uint8_t* from, float scale, float* sums) {
    const uint8_t* const scales = from + 64 + lanes.first() / kGroup;
    lanes.template add_fours<4>(
        from, scale * 64.0f * fp8_scale(from[64 + kGroups]), sums, Float(),
        [=](int row) GW_HD_LAMBDA { return e4m3_to_float(scales[row * (Lanes::kRow / kGroup)]); });
  }

 private:
  GW_HD static uint8_t scale_for(uint32_t largest, float down) {
    return static_cast<uint8_t>(float_to_e4m3<true>(bits_float(largest) * down * (1.0f / 6.0f), -1));
  }
  GW_HD static float inverse(uint8_t scale) {
    const float x = e4m3_to_float(scale);
    return x > 0.0f ? 1.0f / x : 0.0f;
  }
  template <typename Lanes, typename Random>
  GW_HD static void encode_in_groups(const Lanes& lanes, const float* values, Random random, float down,
                                     uint8_t* to) {
    uint8_t* const scales = to + 64;
    for (int g = 0; g < kGroups; ++g) {
      const float* const group = values + kGroup * g;
      const uint32_t most =
          lanes.max(kGroup, [=](int i) GW_HD_LAMBDA { return finite_magnitude_bits(group[i]); });
      scales[g] = scale_for(most, down);
    }
    lanes.each(0, [](int) GW_HD_LAMBDA {
    });  // synchronizes: every lane wrote the same scales, and the next loop reads them
    with_draws(random, [=](const auto& draw) GW_HD_LAMBDA {
      for (int g = 0; g < kGroups / 2; ++g) {  // byte j holds codes j and j + 64
        const float up = inverse(scales[g]), upper_up = inverse(scales[g + kGroups / 2]);
        lanes.each(kGroup, [=](int k) GW_HD_LAMBDA {
          const int j = kGroup * g + k;
          const uint32_t low = Float::code_of(values[j] * down * up, draw(j));
          const uint32_t high = Float::code_of(values[j + 64] * down * upper_up, draw(j + 64));
          to[j] = static_cast<uint8_t>(low | high << 4);
        });
      }
    });
  }
};

}  // namespace gradwire
