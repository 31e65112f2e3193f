// QSGD: multiples of norm / s, rounded stochastically, so the result is unbiased. The norm is the block's L2
// norm, in FP32; a code is a sign and a level up to s = 127 (8 bits), or 7 (4 bits). Error: n / s^2 times the
// mean of f (1 - f) over the fractions f of levels. This mean is 1/6 where values span many levels.
#pragma once

#include <cmath>

#include "kernels/math/small_float.h"
#include "kernels/wire/block.h"
#include "kernels/wire/codes.h"

namespace gradwire {

struct Qsgd {
  int size = 512;
  int bits = 8;

  static constexpr int kMaxBlock = 512;
  static constexpr const char* kSummary = "levels of the L2 norm of 512 values, rounded at random";
  static constexpr const char* kSource = "Alistarh et al., QSGD, NeurIPS 2017";
  static constexpr Rounding kRounding = Rounding::stochastic;
  static constexpr bool kStochastic = true, kMasks = true;
  static constexpr Rotation kRotation = Rotation::optional;
  static constexpr std::array kExamples = {"bits=4,block=64"};

  GW_HD int block() const { return size; }
  GW_HD int bytes() const { return size * bits / 8 + 4; }
  GW_HD static int scale_bytes() { return 4; }
  double gaussian_error(bool) const { return size == 512 && bits == 8 ? 512.0 / (6 * 127 * 127) : 0; }
  // Returns the bound of the squared error. The largest mean of n f (1 - f) / s^2 over blocks of one norm is
  // at f = 1/2. If n values of that norm cannot be half a level each, the largest mean is at f = s / sqrt(n);
  // with this f, rounding to nearest may send only zeros.
  double error_bound(bool stochastic) const {
    const double n = size, s = (1 << (bits - 1)) - 1;
    if (n <= 4 * s * s) return n / (4 * s * s);
    return stochastic ? std::sqrt(n) / s - 1 : 1;
  }
  std::vector<FormatOption> options() {
    return {block_option(&size),
            {.key = "bits", .value = &bits, .least = 4, .most = 8, .power_of_two = true}};
  }

  template <int kBits, typename Lanes, typename Values, typename Random>
  GW_HD void pack(const Lanes& lanes, Values values, float down, float share, Random random,
                  uint8_t* to) const {
    constexpr uint32_t kSign = 1u << (kBits - 1), kLevels = kSign - 1u;
    with_draws(random, [=, this](const auto& draw) GW_HD_LAMBDA {
      pack_codes<kBits>(lanes, size, to, [=](auto i) GW_HD_LAMBDA {
        // The value relative to the norm, at most 1.
        const float part = bits_float(finite_magnitude_bits(values[i])) * down * share;
        const uint32_t level = round_magnitude(part * static_cast<float>(kLevels), draw(i));
        return (level > kLevels ? kLevels : level) | (float_bits(values[i]) >> 31) * kSign;
      });
    });
  }
  template <int kBits, typename Lanes, typename Values>
  GW_HD void unpack(const Lanes& lanes, const uint8_t* from, int count, float norm, Values values) const {
    constexpr uint32_t kSign = 1u << (kBits - 1), kLevels = kSign - 1u;
    const float unit = norm / static_cast<float>(kLevels);
    unpack_codes<kBits>(lanes, from, size, count, [=](auto i, uint32_t code) GW_HD_LAMBDA {
      const float x = unit * static_cast<float>(code & kLevels);
      values[i] = (code & kSign) != 0 ? -x : x;
    });
  }

  template <typename Lanes, typename Values, typename Random>
  GW_HD void encode(const Lanes& lanes, Values values, int count, Random random, uint8_t* to) const {
    const uint32_t largest = largest_bits(lanes, values, count);
    const uint8_t near = near_exponent(largest);
    const float down = fp8_inverse_scale(near);
    const float root = sqrtf(lanes.sum(count, [=](auto i) GW_HD_LAMBDA {
      const float x = values[i] * down;
      return x * x;
    }));
    const float norm = root * fp8_scale(near), most = 0x1.fffffep127f;
    put_float(to + size * bits / 8, norm > most ? most : norm);
    const float share = root > 0.0f ? 1.0f / root : 0.0f;
    if (bits == 8) {
      pack<8>(lanes, values, down, share, random, to);
    } else {
      pack<4>(lanes, values, down, share, random, to);
    }
  }
  template <typename Lanes, typename Values>
  GW_HD void decode(const Lanes& lanes, const uint8_t* from, int count, Values values) const {
    const float norm = get_float(lanes, from + size * bits / 8);
    if (bits == 8) {
      unpack<8>(lanes, from, count, norm, values);
    } else {
      unpack<4>(lanes, from, count, norm, values);
    }
  }
};

// TernGrad: -1, 0 or 1 times the block's largest magnitude; nonzero with probability |x| / largest, so the
// result is unbiased. A value takes 2 bits; a block also sends the largest magnitude in FP32. Values are
// first clamped to a multiple of their root mean square: 2.5 in the source, 2 in this implementation. At 2.5
// the error is as large as the values, and the residual grows from step to step in a ring of eight. With
// clip=off the residual grows in any schedule. Both settings need ef=off.

struct TernGrad {
  int size = 128;
  int clip = 0;  // 2, 2.5, off

  static constexpr int kMaxBlock = 512;
  static constexpr const char* kSummary =
      "-1, 0 or 1 times the largest of 128 values after clipping, at random";
  static constexpr const char* kSource = "Wen et al., TernGrad, NeurIPS 2017";
  static constexpr Rounding kRounding = Rounding::stochastic;
  static constexpr bool kStochastic = true, kMasks = true;
  static constexpr Rotation kRotation = Rotation::optional;
  static constexpr std::array kExamples = {"clip=off", "block=512,clip=2.5"};

  GW_HD int block() const { return size; }
  GW_HD int bytes() const { return size / 4 + 4; }
  GW_HD static int scale_bytes() { return 4; }
  GW_HD bool clips() const { return clip < 2; }
  double gaussian_error(bool) const {
    if (size != 128) return 0;
    return clip == 0 ? 0.652 : clip == 1 ? 0.996 : 1.265;
  }
  // Returns the bound of the squared error. In the worst block one value is `most` times the root mean square
  // and the other values are equal.
  double error_bound(bool stochastic) const {
    const double n = size, most = clip == 0 ? 2 : clip == 1 ? 2.5 : std::sqrt(n) / 2;
    return stochastic ? (most * std::sqrt((n - 1) * (n - most * most)) - (n - most * most)) / n : 1 - 1 / n;
  }
  std::vector<FormatOption> options() {
    return {block_option(&size), {.key = "clip", .value = &clip, .words = {"2", "2.5", "off"}}};
  }

  template <typename Lanes, typename Values, typename Random>
  GW_HD void encode(const Lanes& lanes, Values values, int count, Random random, uint8_t* to) const {
    const uint32_t most = largest_bits(lanes, values, count);
    float largest = bits_float(most);
    if (clips()) {
      const uint8_t near = near_exponent(most);
      const float down = fp8_inverse_scale(near);
      const float squares = lanes.sum(count, [=](auto i) GW_HD_LAMBDA {
        const float x = values[i] * down;
        return x * x;
      });
      const float limit =
          (clip == 0 ? 2.0f : 2.5f) * sqrtf(squares / static_cast<float>(count)) * fp8_scale(near);
      if (limit < largest) largest = limit;
    }
    put_float(to + size / 4, largest);
    with_draws(random, [=, this](const auto& draw) GW_HD_LAMBDA {
      pack_codes<2>(lanes, size, to, [=](auto i) GW_HD_LAMBDA {
        const int32_t drawn = draw(i);  // out of 2^16; rounding to nearest compares with a half
        const float threshold = static_cast<float>(drawn < 0 ? 32768 : drawn) * (1.0f / 65536.0f) * largest;
        const uint32_t bits = float_bits(values[i]);
        return bits_float(bits & 0x7fffffffu) > threshold ? 1u + (bits >> 31) : 0u;
      });
    });
  }
  template <typename Lanes, typename Values>
  GW_HD void decode(const Lanes& lanes, const uint8_t* from, int count, Values values) const {
    const float largest = get_float(lanes, from + size / 4);
    unpack_codes<2>(lanes, from, size, count, [=](auto i, uint32_t code) GW_HD_LAMBDA {
      const float x = code == 0u ? 0.0f : largest;
      values[i] = code == 2u ? -x : x;
    });
  }
  template <typename Lanes>
  GW_HD bool adds(const Lanes& lanes, const uint8_t* from, float scale) const {
    const float unit = scale * get_float(lanes, from + size / 4);
    return unit >= 0x1p-126f && unit < 0x1p90f;  // not rounded
  }
  template <typename Lanes>
  GW_HD void add(const Lanes& lanes, const uint8_t* from, float scale, float* sums) const {
    const float unit = scale * get_float(lanes, from + size / 4);
    lanes.template add_fours<2>(from, unit, sums, [](const auto& words, float* x) GW_HD_LAMBDA {
      constexpr uint32_t kEach = 0x01010101u;
      for (const uint32_t codes : words) {  // 0, 1 and -1 as E4M3; 1 is 0x38
        const uint32_t upper = codes >> 1, some = (codes | upper) & kEach, minus = upper & ~codes & kEach;
        e4m3x4_to_floats(some * 0x38u + minus * 0x80u, x);
        x += 4;
      }
    });
  }
};

// Natural compression: a sign and a power of two, 8 bits per value. One byte holds the block's largest
// exponent; values of at most 2^-125 times the largest power become 0. Unbiased rounding between neighbouring
// powers of two has a squared error of at most 1/8 of the value's square (Theorem 1 of the source).
//
// Codes: sign in the top bit, then 0 for zero, 127 for NaN and Inf, and 1 to 126 for 2^(top - 126 + code).

struct Natural {
  int size = 128;

  static constexpr int kMaxBlock = 512;
  static constexpr const char* kSummary = "signs and powers of two";
  static constexpr const char* kSource =
      "Horvath et al., Natural Compression for Distributed Deep Learning, 2019";
  static constexpr Rounding kRounding = Rounding::stochastic;
  static constexpr bool kStochastic = true, kMasks = false;
  static constexpr Rotation kRotation = Rotation::optional;
  static constexpr std::array kExamples = {"block=512"};

  GW_HD int block() const { return size; }
  GW_HD int bytes() const { return size + 1; }
  GW_HD static int scale_bytes() { return 1; }
  static double gaussian_error(bool) { return 8.33e-2; }
  static double error_bound(bool stochastic) { return stochastic ? 1.0 / 8 : 1.0 / 9; }
  std::vector<FormatOption> options() { return {block_option(&size)}; }

  // Returns the exponent field of a finite magnitude rounded to a power of two; 0 for magnitudes below
  // 2^-126.
  GW_HD static uint32_t rounded_exponent(uint32_t bits, int32_t random) {
    const uint32_t exponent = bits >> 23, fraction = bits & 0x7fffffu;
    const uint32_t up = random < 0 ? (fraction >= 0x400000u ? 1u : 0u)
                                   : ((fraction >> 7) + static_cast<uint32_t>(random)) >> 16;
    const uint32_t rounded = exponent + up;
    return exponent == 0 ? 0u : rounded > 254u ? 254u : rounded;
  }

  template <typename Lanes, typename Values, typename Random>
  GW_HD void encode(const Lanes& lanes, Values values, int count, Random random, uint8_t* to) const {
    const uint32_t largest =
        lanes.max(count, [=](auto i) GW_HD_LAMBDA { return finite_magnitude_bits(values[i]); });
    uint32_t top = (largest >> 23) + 1u;  // rounding may raise the exponent by 1
    top = top > 254u ? 254u : top;
    to[size] = static_cast<uint8_t>(top);
    with_draws(random, [=, this](const auto& draw) GW_HD_LAMBDA {
      pack_codes<8>(lanes, size, to, [=](auto i) GW_HD_LAMBDA {
        const uint32_t bits = float_bits(values[i]), magnitude = bits & 0x7fffffffu;
        const uint32_t exponent = rounded_exponent(magnitude, draw(i));
        uint32_t code = exponent + 126u > top ? exponent + 126u - top : 0u;
        code = exponent == 0u ? 0u : code;
        code = magnitude >= 0x7f800000u ? 127u : code;
        return (bits >> 31) << 7 | code;
      });
    });
  }
  template <typename Lanes, typename Values>
  GW_HD void decode(const Lanes& lanes, const uint8_t* from, int count, Values values) const {
    const uint32_t top = from[size];
    unpack_codes<8>(lanes, from, size, count, [=](auto i, uint32_t byte) GW_HD_LAMBDA {
      const uint32_t code = byte & 127u, sign = (byte >> 7) << 31;
      uint32_t bits = code == 0u ? 0u : (top + code - 126u) << 23;
      bits = code == 127u ? 0x7fc00000u : bits;
      values[i] = bits_float(bits | sign);
    });
  }
};

// One bit: the sign, times the block's mean magnitude in FP32, the magnitude with the least squared error.
// Error on a Gaussian: 1 - 2 / pi. The format is biased and needs error feedback.

struct Sign {
  int size = 512;

  static constexpr int kMaxBlock = 512;
  static constexpr const char* kSummary = "signs, and the mean magnitude of 512 values";
  static constexpr const char* kSource =
      "Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, with the mean of a block";
  static constexpr Rounding kRounding = Rounding::nearest;
  static constexpr bool kStochastic = false, kMasks = true;
  static constexpr Rotation kRotation = Rotation::optional;
  static constexpr std::array kExamples = {"block=64"};

  GW_HD int block() const { return size; }
  GW_HD int bytes() const { return size / 8 + 4; }
  GW_HD static int scale_bytes() { return 4; }
  double gaussian_error(bool) const { return size == 512 ? 0.3634 : 0; }
  double error_bound(bool) const { return 1 - 1.0 / size; }
  std::vector<FormatOption> options() { return {block_option(&size)}; }

  template <typename Lanes, typename Values, typename Random>
  GW_HD void encode(const Lanes& lanes, Values values, int count, Random, uint8_t* to) const {
    // Scale before summing, so that the sum does not overflow.
    const float share = 1.0f / static_cast<float>(count);
    const float mean = lanes.sum(
        count, [=](auto i) GW_HD_LAMBDA { return bits_float(float_bits(values[i]) & 0x7fffffffu) * share; });
    const float most = 0x1.fffffep127f;
    put_float(to + size / 8, mean > most ? most : mean);
    pack_codes<1>(lanes, size, to, [=](auto i) GW_HD_LAMBDA { return float_bits(values[i]) >> 31; });
  }
  template <typename Lanes, typename Values>
  GW_HD void decode(const Lanes& lanes, const uint8_t* from, int count, Values values) const {
    const float mean = get_float(lanes, from + size / 8);
    unpack_codes<1>(lanes, from, size, count,
                    [=](auto i, uint32_t code) GW_HD_LAMBDA { values[i] = code != 0u ? -mean : mean; });
  }
};

}  // namespace gradwire
