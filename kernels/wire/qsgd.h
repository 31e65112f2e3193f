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
    const uint32_t largest =
        lanes.max(count, [=](auto i) GW_HD_LAMBDA { return float_bits(values[i]) & 0x7fffffffu; });
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
    const float norm = get_float(from + size * bits / 8);
    if (bits == 8) {
      unpack<8>(lanes, from, count, norm, values);
    } else {
      unpack<4>(lanes, from, count, norm, values);
    }
  }
};

}  // namespace gradwire
