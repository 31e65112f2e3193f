// One bit: the sign, times the block's mean magnitude in FP32, the magnitude with the least squared error.
// Error on a Gaussian: 1 - 2 / pi. The format is biased and needs error feedback.
#pragma once

#include "kernels/math/small_float.h"
#include "kernels/wire/block.h"
#include "kernels/wire/codes.h"

namespace gradwire {

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
    const float mean = get_float(from + size / 8);
    unpack_codes<1>(lanes, from, size, count,
                    [=](auto i, uint32_t code) GW_HD_LAMBDA { values[i] = code != 0u ? -mean : mean; });
  }
};

}  // namespace gradwire
