// TernGrad: -1, 0 or 1 times the block's largest magnitude; nonzero with probability |x| / largest, so the
// result is unbiased. A value takes 2 bits; a block also sends the largest magnitude in FP32. Values are
// first clamped to a multiple of their root mean square: 2.5 in the source, 2 in this implementation. At 2.5
// the error is as large as the values, and the residual grows from step to step in a ring of eight. With
// clip=off the residual grows in any schedule. Both settings need ef=off.
#pragma once

#include <cmath>

#include "kernels/math/small_float.h"
#include "kernels/wire/block.h"
#include "kernels/wire/codes.h"

namespace gradwire {

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
    const uint32_t most =
        lanes.max(count, [=](auto i) GW_HD_LAMBDA { return float_bits(values[i]) & 0x7fffffffu; });
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
    const float largest = get_float(from + size / 4);
    unpack_codes<2>(lanes, from, size, count, [=](auto i, uint32_t code) GW_HD_LAMBDA {
      const float x = code == 0u ? 0.0f : largest;
      values[i] = code == 2u ? -x : x;
    });
  }
};

}  // namespace gradwire
