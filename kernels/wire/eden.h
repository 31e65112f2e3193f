// EDEN with 1 to 4 bits. After a random rotation any values are nearly normal, so each value becomes the
// nearest Lloyd-Max level of a Gaussian. The FP32 scale minimizes the squared error for the levels chosen.
// (The source's unbiased scale is larger; with error feedback the smaller error is better.) The error is the
// error of Lloyd-Max: 0.3634, 0.1175, 0.03454, 0.009497 for 1 to 4 bits.
#pragma once

#include <cmath>

#include "kernels/math/fp8.h"
#include "kernels/wire/block.h"
#include "kernels/wire/codes.h"

namespace gradwire {

// Returns the positive levels of the Lloyd-Max quantizer of 2^kBits levels for a normal variable, and the
// boundaries between them.
template <int kBits>
GW_HD float lloyd_max_level(uint32_t k) {
  if constexpr (kBits == 1) return 0.7978846f;
  if constexpr (kBits == 2) return k == 0 ? 0.45278f : 1.510418f;
  if constexpr (kBits == 3)
    return k < 2 ? (k == 0 ? 0.2450942f : 0.7560053f) : k == 2 ? 1.343909f : 2.151946f;
  const float low = k < 2 ? (k == 0 ? 0.128395f : 0.3880483f) : k == 2 ? 0.6567591f : 0.9423405f;
  const float high = k < 6 ? (k == 4 ? 1.256231f : 1.618046f) : k == 6 ? 2.069017f : 2.73259f;
  return k < 4 ? low : high;
}
template <int kBits>
GW_HD uint32_t lloyd_max_code(float magnitude) {
  const auto above = [=](float boundary) GW_HD_LAMBDA { return magnitude > boundary ? 1u : 0u; };
  if constexpr (kBits == 1) return 0;
  if constexpr (kBits == 2) return above(0.9815988f);
  if constexpr (kBits == 3) return above(0.5005497f) + above(1.049957f) + above(1.747927f);
  return above(0.2582217f) + above(0.5224037f) + above(0.7995498f) + above(1.099286f) + above(1.437139f) +
         above(1.843532f) + above(2.400803f);
}

struct Eden {
  int size = 512;
  int bits = 4;

  static constexpr int kMaxBlock = 512;
  static constexpr const char* kSummary = "Lloyd-Max levels of 512 rotated values, and their scale";
  static constexpr const char* kSource = "Vargaftik et al., EDEN, ICML 2022";
  static constexpr Rounding kRounding = Rounding::nearest;
  static constexpr bool kStochastic = false, kMasks = true;
  static constexpr Rotation kRotation = Rotation::always;
  static constexpr std::array kExamples = {"bits=1", "bits=2", "bits=3"};

  GW_HD int block() const { return size; }
  GW_HD int bytes() const { return size * bits / 8 + 4; }
  GW_HD static int scale_bytes() { return 4; }
  double gaussian_error(bool) const {
    if (size != 512) return 0;
    return bits == 1 ? 0.3634 : bits == 2 ? 0.1175 : bits == 3 ? 0.03454 : 0.009497;
  }
  // Returns the bound of the squared error. The bound for levels from a to b is 1 - 4 a b / (a + b)^2 / n, by
  // the inequalities of Chebyshev and Kantorovich.
  double error_bound(bool) const {
    constexpr double kShares[] = {1, 0.71, 0.367, 0.171};  // 4 a b / (a + b)^2
    return 1 - kShares[bits - 1] / size;
  }
  std::vector<FormatOption> options() {
    return {block_option(&size), {.key = "bits", .value = &bits, .least = 1, .most = 4}};
  }

  template <int kBits, typename Lanes>
  GW_HD void encode_bits(const Lanes& lanes, const float* values, int count, uint8_t* to) const {
    constexpr uint32_t kSign = 1u << (kBits - 1);
    const uint32_t largest =
        lanes.max(count, [=](int i) GW_HD_LAMBDA { return float_bits(values[i]) & 0x7fffffffu; });
    const uint8_t near = near_exponent(largest);
    const float down = fp8_inverse_scale(near);
    const float squares = lanes.sum(count, [=](int i) GW_HD_LAMBDA {
      const float x = values[i] * down;
      return x * x;
    });
    const float deviation = sqrtf(squares / static_cast<float>(count));
    const float per = deviation > 0.0f ? down / deviation : 0.0f;
    const auto level_of = [=](int i) GW_HD_LAMBDA {
      return lloyd_max_level<kBits>(
          lloyd_max_code<kBits>(bits_float(float_bits(values[i]) & 0x7fffffffu) * per));
    };
    const float dot = lanes.sum(count, [=](int i) GW_HD_LAMBDA {
      return bits_float(float_bits(values[i] * down) & 0x7fffffffu) * level_of(i);
    });
    const float levels = lanes.sum(count, [=](int i) GW_HD_LAMBDA {
      const float level = level_of(i);
      return level * level;
    });
    const float scale = dot / levels * fp8_scale(near), most = 0x1p126f;
    put_float(to + size * kBits / 8, scale > most ? most : scale);
    pack_codes<kBits>(lanes, size, to, [=](int i) GW_HD_LAMBDA {
      const uint32_t bits_of = float_bits(values[i]);
      const uint32_t code = lloyd_max_code<kBits>(bits_float(bits_of & 0x7fffffffu) * per);
      return code | (bits_of >> 31) * kSign;
    });
  }
  template <int kBits, typename Lanes, typename Values>
  GW_HD void decode_bits(const Lanes& lanes, const uint8_t* from, int count, Values values) const {
    constexpr uint32_t kSign = 1u << (kBits - 1);
    const float scale = get_float(from + size * kBits / 8);
    unpack_codes<kBits>(lanes, from, size, count, [=](int i, uint32_t code) GW_HD_LAMBDA {
      const float x = scale * lloyd_max_level<kBits>(code & (kSign - 1u));
      values[i] = (code & kSign) != 0 ? -x : x;
    });
  }

  template <typename Lanes>
  GW_HD void encode(const Lanes& lanes, const float* values, int count, const uint16_t*, uint8_t* to) const {
    switch (bits) {
      case 1:
        return encode_bits<1>(lanes, values, count, to);
      case 2:
        return encode_bits<2>(lanes, values, count, to);
      case 3:
        return encode_bits<3>(lanes, values, count, to);
      default:
        return encode_bits<4>(lanes, values, count, to);
    }
  }
  template <typename Lanes, typename Values>
  GW_HD void decode(const Lanes& lanes, const uint8_t* from, int count, Values values) const {
    switch (bits) {
      case 1:
        return decode_bits<1>(lanes, from, count, values);
      case 2:
        return decode_bits<2>(lanes, from, count, values);
      case 3:
        return decode_bits<3>(lanes, from, count, values);
      default:
        return decode_bits<4>(lanes, from, count, values);
    }
  }
};

}  // namespace gradwire
