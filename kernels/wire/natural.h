// Natural compression: a sign and a power of two, 8 bits per value. One byte holds the block's largest
// exponent; values of at most 2^-125 times the largest power become 0. Unbiased rounding between neighbouring
// powers of two has a squared error of at most 1/8 of the value's square (Theorem 1 of the source).
//
// Codes: sign in the top bit, then 0 for zero, 127 for NaN and Inf, and 1 to 126 for 2^(top - 126 + code).
#pragma once

#include "kernels/math/small_float.h"
#include "kernels/wire/block.h"
#include "kernels/wire/codes.h"

namespace gradwire {

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

}  // namespace gradwire
