// EDEN with 1 to 5 bits. After a random rotation any values are nearly normal, so each value becomes the
// nearest Lloyd-Max level of a Gaussian. The FP32 scale minimizes the squared error for the levels chosen.
// (The source's unbiased scale is larger; with error feedback the smaller error is better.) The error is the
// error of Lloyd-Max: 0.3634, 0.1175, 0.03454, 0.009497, 0.002499 for 1 to 5 bits.
#pragma once

#include <cmath>

#include "kernels/math/small_float.h"
#include "kernels/wire/block.h"
#include "kernels/wire/codes.h"

namespace gradwire {

// Calls f(l0, b0, l1, b1, l2, ...): the positive levels of the Lloyd-Max quantizer of 2^kBits levels for a
// normal variable, ascending, and the boundaries between them.
template <int kBits, typename F>
GW_HD constexpr auto with_lloyd_max(const F& f) {
  if constexpr (kBits == 1) {
    return f(0.7978846f);
  } else if constexpr (kBits == 2) {
    return f(0.45278f, 0.9815988f, 1.510418f);
  } else if constexpr (kBits == 3) {
    return f(0.2450942f, 0.5005497f, 0.7560053f, 1.049957f, 1.343909f, 1.747927f, 2.151946f);
  } else if constexpr (kBits == 4) {
    return f(0.128395f, 0.2582217f, 0.3880483f, 0.5224037f, 0.6567591f, 0.7995498f, 0.9423405f, 1.099286f,
             1.256231f, 1.437139f, 1.618046f, 1.843532f, 2.069017f, 2.400803f, 2.73259f);
  } else {
    return f(0.06588966f, 0.1319707f, 0.1980518f, 0.2647151f, 0.3313783f, 0.3990389f, 0.4666995f, 0.5358166f,
             0.6049336f, 0.6760347f, 0.7471357f, 0.8208504f, 0.8945651f, 0.9716742f, 1.048783f, 1.130294f,
             1.211804f, 1.299072f, 1.38634f, 1.481284f, 1.576228f, 1.681731f, 1.787233f, 1.907981f, 2.028728f,
             2.173234f, 2.317739f, 2.504429f, 2.69112f, 2.975926f, 3.260732f);
  }
}
// Functions of these levels: the level of a magnitude, its code, and the level of a code.
struct LevelOfMagnitude {
  float x;
  GW_HD float operator()(float level) const { return level; }
  template <typename... Rest>
  GW_HD float operator()(float level, float boundary, float next, Rest... rest) const {
    return (*this)(x > boundary ? next : level, rest...);
  }
};
struct CodeOfMagnitude {
  float x;
  GW_HD uint32_t operator()(float) const { return 0; }
  template <typename... Rest>
  GW_HD uint32_t operator()(float, float boundary, Rest... rest) const {
    return (x > boundary ? 1u : 0u) + (*this)(rest...);
  }
};
struct LevelOfCode {
  float code, before = 0.5f;  // GCC makes a switch of comparisons of integers, and does not vectorize it
  GW_HD float operator()(float level) const { return level; }
  template <typename... Rest>
  GW_HD float operator()(float level, float, float next, Rest... rest) const {
    return LevelOfCode{code, before + 1.0f}(code > before ? next : level, rest...);
  }
};

// Tables of 32 entries for lanes that look up the level of a magnitude x without comparing all boundaries.
// Bin rint(x * kPer) holds at most one boundary, and has `before` boundaries below it. The last bin is NaN's.
template <int kBits>
struct LevelBins {
  static constexpr float kPer = kBits == 5 ? 8.0f : 4.0f;
  float boundary[32] = {};
  uint32_t before[32] = {};
  float level[32] = {};  // by code, with its sign
  constexpr LevelBins() {
    with_lloyd_max<kBits>([this](auto... x) {
      const float all[] = {x...};
      for (int i = 0; i < 32; ++i) {
        boundary[i] = 100.0f;
        for (size_t b = 1; b < sizeof...(x) && i < 31; b += 2) {
          const float at = all[b] * kPer - static_cast<float>(i);
          if (at < -0.5f) ++before[i];
          if (at >= -0.5f && at < 0.5f) boundary[i] = all[b];
        }
        const float magnitude = all[static_cast<size_t>(i) * 2 % (sizeof...(x) + 1)];
        level[i] = (i >> (kBits - 1) & 1) != 0 ? -magnitude : magnitude;
      }
      return 0;
    });
  }
};

// Hides x's origin from nvcc, which otherwise keeps the comparisons of one pass in registers for the next.
GW_HD float unknown(float x) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+f"(x));
#endif
  return x;
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
  static constexpr std::array kExamples = {"bits=1", "bits=2", "bits=3", "bits=5", "block=64"};

  GW_HD int block() const { return size; }
  GW_HD int bytes() const { return size * bits / 8 + 4; }
  GW_HD static int scale_bytes() { return 4; }
  double gaussian_error(bool) const {
    if (size != 512) return 0;
    constexpr double kErrors[] = {0.3634, 0.1175, 0.03454, 0.009497, 0.002499};
    return kErrors[bits - 1];
  }
  // Returns the bound of the squared error. The bound for levels from a to b is 1 - 4 a b / (a + b)^2 / n, by
  // the inequalities of Chebyshev and Kantorovich.
  double error_bound(bool) const {
    constexpr double kShares[] = {1, 0.71, 0.367, 0.171, 0.077};  // 4 a b / (a + b)^2
    return 1 - kShares[bits - 1] / size;
  }
  std::vector<FormatOption> options() {
    return {block_option(&size), {.key = "bits", .value = &bits, .least = 1, .most = 5}};
  }

  template <int kBits, typename Lanes, typename Values>
  GW_HD void encode_bits(const Lanes& lanes, Values values, int count, uint8_t* to) const {
    constexpr uint32_t kSign = 1u << (kBits - 1);
    const uint32_t largest = largest_bits(lanes, values, count);
    const uint8_t near = near_exponent(largest);
    const float down = fp8_inverse_scale(near);
    const float squares = lanes.sum(count, [=](auto i) GW_HD_LAMBDA {
      const float x = values[i] * down;
      return x * x;
    });
    const float deviation = sqrtf(squares / static_cast<float>(count));
    const float per = deviation > 0.0f ? down / deviation : 0.0f;
    if constexpr (requires { Lanes::kRows; }) {
      // A lane holds an entry of each table, and the codes of its values.
      static constexpr LevelBins<kBits> kBins;
      const float boundary = kBins.boundary[lanes.lane], level_here = kBins.level[lanes.lane];
      const uint32_t before = kBins.before[lanes.lane];
      uint32_t fours[Lanes::kHeld / 4] = {};
      lanes.each(count, [&](auto i) GW_HD_LAMBDA {
        const uint32_t bits_of = float_bits(values[i]);
        const float x = at_most(bits_float(bits_of & 0x7fffffffu) * per, 30.0f / LevelBins<kBits>::kPer);
        const uint32_t bin = float_bits(fmaf(x, LevelBins<kBits>::kPer, 8388608.0f));
        const uint32_t code = lanes.look_up(before, bin) + (x > lanes.look_up(boundary, bin) ? 1u : 0u);
        fours[i.k / 4] |= (code | (bits_of >> 31) * kSign) << (8 * (i.k % 4));
      });
      const auto level_of = [&](auto i) GW_HD_LAMBDA {
        return lanes.look_up(level_here, fours[i.k / 4] >> (8 * (i.k % 4)));
      };
      const float dot = lanes.sum(count, [&](auto i) GW_HD_LAMBDA { return values[i] * down * level_of(i); });
      const float levels = lanes.sum(count, [&](auto i) GW_HD_LAMBDA {
        const float level = level_of(i);
        return level * level;
      });
      const float scale = dot / levels * fp8_scale(near), most = 0x1p126f;
      put_float(to + size * kBits / 8, scale > most ? most : scale);
      return lanes.template pack_fours<kBits>(fours, to);
    }
    const auto level_of = [=](auto i) GW_HD_LAMBDA {
      const float magnitude = bits_float(float_bits(values[i]) & 0x7fffffffu);
      return with_lloyd_max<kBits>(LevelOfMagnitude{unknown(magnitude * per)});
    };
    const float dot = lanes.sum(count, [=](auto i) GW_HD_LAMBDA {
      return bits_float(float_bits(values[i] * down) & 0x7fffffffu) * level_of(i);
    });
    const float levels = lanes.sum(count, [=](auto i) GW_HD_LAMBDA {
      const float level = level_of(i);
      return level * level;
    });
    const float scale = dot / levels * fp8_scale(near), most = 0x1p126f;
    put_float(to + size * kBits / 8, scale > most ? most : scale);
    pack_codes<kBits>(lanes, size, to, [=](auto i) GW_HD_LAMBDA {
      const uint32_t bits_of = float_bits(values[i]);
      const float magnitude = bits_float(bits_of & 0x7fffffffu);
      const uint32_t code = with_lloyd_max<kBits>(CodeOfMagnitude{unknown(magnitude * per)});
      return code | (bits_of >> 31) * kSign;
    });
  }
  template <int kBits, typename Lanes, typename Values>
  GW_HD void decode_bits(const Lanes& lanes, const uint8_t* from, int count, Values values) const {
    constexpr uint32_t kSign = 1u << (kBits - 1);
    const float scale = get_float(lanes, from + size * kBits / 8);
    if constexpr (requires { Lanes::kRows; }) {
      static constexpr LevelBins<kBits> kBins;
      const float here = scale * kBins.level[lanes.lane];
      return lanes.template unpack<kBits>(from, size, count, [=](auto i, uint32_t code) GW_HD_LAMBDA {
        values[i] = lanes.look_up(here, code);
      });
    }
    unpack_codes<kBits>(lanes, from, size, count, [=](auto i, uint32_t code) GW_HD_LAMBDA {
      const float x = scale * with_lloyd_max<kBits>(LevelOfCode{static_cast<float>(code & (kSign - 1u))});
      values[i] = (code & kSign) != 0 ? -x : x;
    });
  }

  template <typename Lanes, typename Values, typename Random>
  GW_HD void encode(const Lanes& lanes, Values values, int count, Random, uint8_t* to) const {
    switch (bits) {
      case 1:
        return encode_bits<1>(lanes, values, count, to);
      case 2:
        return encode_bits<2>(lanes, values, count, to);
      case 3:
        return encode_bits<3>(lanes, values, count, to);
      case 4:
        return encode_bits<4>(lanes, values, count, to);
      default:
        return encode_bits<5>(lanes, values, count, to);
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
      case 4:
        return decode_bits<4>(lanes, from, count, values);
      default:
        return decode_bits<5>(lanes, from, count, values);
    }
  }
};

}  // namespace gradwire
