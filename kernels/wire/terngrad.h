// TernGrad: -1, 0 or 1 times the block's largest magnitude, 1 with probability |x| / largest, so that the mean is
// right. 2 bits a value, and the largest in FP32. Its error is larger than the values, so rounding to nearest,
// which keeps only values above half of the largest, is the smaller one.
#pragma once

#include "kernels/math/fp8.h"
#include "kernels/wire/block.h"
#include "kernels/wire/codes.h"

namespace gradwire {

struct TernGrad {
  int size = 128;

  static constexpr int kMaxBlock = 512;
  static constexpr const char* kSummary = "-1, 0 or 1 times the largest of 128 values, at random";
  static constexpr const char* kSource = "Wen et al., TernGrad, NeurIPS 2017";
  static constexpr Rounding kRounding = Rounding::stochastic;
  static constexpr bool kStochastic = true, kWholeBlockNan = true;
  static constexpr Rotation kRotation = Rotation::optional;
  static constexpr std::array kExamples = {"block=512"};

  GW_HD int block() const { return size; }
  GW_HD int bytes() const { return size / 4 + 4; }
  double gaussian_error(bool) const { return size == 128 ? 1.265 : 0; }
  std::vector<FormatOption> options() { return {block_option(&size)}; }

  template <typename Lanes>
  GW_HD void encode(const Lanes& lanes, const float* values, int count, const uint16_t* random,
                    uint8_t* to) const {
    const float largest =
        bits_float(lanes.max(count, [=](int i) GW_HD_LAMBDA { return float_bits(values[i]) & 0x7fffffffu; }));
    put_float(to + size / 4, largest);
    pack_codes<2>(lanes, size, to, [=](int i) GW_HD_LAMBDA {
      // Out of 2^16; to nearest is against a half.
      const float draw = (random != nullptr ? static_cast<float>(random[i]) : 32768.0f) * (1.0f / 65536.0f);
      const uint32_t bits = float_bits(values[i]);
      const bool one = bits_float(bits & 0x7fffffffu) > draw * largest;
      return one ? 1u + (bits >> 31) : 0u;
    });
  }
  template <typename Lanes, typename Values>
  GW_HD void decode(const Lanes& lanes, const uint8_t* from, int count, Values values) const {
    const float largest = get_float(from + size / 4);
    unpack_codes<2>(lanes, from, size, count, [=](int i, uint32_t code) GW_HD_LAMBDA {
      const float x = code == 0u ? largest * 0.0f : largest;  // 0, but NaN in a block that is NaN
      values[i] = code == 2u ? -x : x;
    });
  }
};

}  // namespace gradwire
