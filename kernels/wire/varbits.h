// Bits that vary by part, in a block of fixed size (the idea of DynamiQ). A block of 4096 values has 64 parts
// of 64. Each part is rotated, so that its values are nearly normal, and gets 0 to 5 bits per value, `bits`
// on average less the bytes of the scales. Encoder and decoder compute the bits from the parts' scales, in
// integers. Each value becomes the nearest Lloyd-Max level (eden.h) times the scale; parts without bits
// decode to 0.
//
// A scale is 2^(unit - (62 - q) / 4): q, 1 to 62, of the part; unit, a power of two, of the block. q = 0 is
// 0. q = 63: the part has non-finite values, which a mask of one bit per value marks. Its finite values
// decode to 0.
#pragma once

#include <cmath>

#include "kernels/math/small_float.h"
#include "kernels/wire/block.h"
#include "kernels/wire/codes.h"
#include "kernels/wire/eden.h"

namespace gradwire {

// Calls body(team, k) for k in [0, n), each with lanes for its own block of 64 values. Lanes may override
// this; then the calls run on different lanes. All lanes see the writes of all calls.
template <typename Lanes, typename Body>
GW_HD void each_team(const Lanes& lanes, int n, const Body& body) {
  if constexpr (requires { lanes.each_team(n, body); }) {
    lanes.each_team(n, body);
  } else {
    for (int k = 0; k < n; ++k) body(lanes, k);
  }
}

struct VarBits {
  int bits = 3;

  static constexpr int kMaxBlock = 4096, kPart = 64, kParts = 64;
  static constexpr int kMax = 5;                             // bits of a part
  static constexpr int kQuarters = 62, kMask = 63;           // q of the largest scale, and of a mask
  static constexpr int kLargestUnit = 253;                   // 2^126 times the largest level is finite
  static constexpr int kScaleBytes = code_bytes<6>(kParts);  // fields of a block: codes, scales, unit
  static constexpr float kMaxOfMean = 1.25f / 0.7978846f;    // 1.25 times a normal variable's ratio
  static constexpr const char* kSummary =
      "Lloyd-Max levels of 64 rotated values, 0 to 5 bits by their scale, in blocks of 4096";
  static constexpr const char* kSource = "bits by block: the idea of DynamiQ; levels: EDEN, ICML 2022";
  static constexpr Rounding kRounding = Rounding::nearest;
  static constexpr bool kStochastic = false, kMasks = false;
  static constexpr bool kSelects = true;  // parts with bits, and of a part with NaN, the NaN
  static constexpr bool kFar = true;
  static constexpr Rotation kRotation = Rotation::never;  // of the block; parts are rotated here
  static constexpr std::array kExamples = {"bits=1", "bits=2", "bits=4"};

  // A part's place in the block: q in bits 0 to 5, bits per value in 8 to 10, and the number of bits per
  // value of all earlier parts from 16 on.
  struct Part {
    uint32_t word;
    GW_HD int quarters() const { return static_cast<int>(word & 63u); }
    GW_HD int bits() const { return static_cast<int>(word >> 8 & 7u); }
    GW_HD int at() const { return static_cast<int>(word >> 16) * (kPart / 8); }
  };

  GW_HD static int block() { return kMaxBlock; }
  // Returns the bits per value of all parts together. At least kParts, for masks; below kMax * kParts.
  GW_HD int all_bits() const { return bits > 1 ? kParts * bits - 3 : kParts; }
  GW_HD int all_codes() const { return all_bits() * (kPart / 8); }
  GW_HD int bytes() const { return all_codes() + kScaleBytes + 1; }
  double gaussian_error(bool) const {
    constexpr double kErrors[] = {0.36, 0.125, 0.0369, 0.0103};
    return kErrors[bits - 1];
  }
  // Returns the bound of the squared error. A part with bits loses at most 1 - 0.71 / 64 of its square, as in
  // eden.h, because its scale is 0.92 to 1.71 times the mean magnitude. At least all_bits() / kMax parts
  // have bits. A part without bits has at most 1.87 times their mean magnitude, and 64 times the square that
  // the mean magnitude implies.
  double error_bound(bool) const {
    constexpr double kShares[] = {3.1, 7, 13, 24};
    return 1 - kShares[bits - 1] / kMaxBlock;
  }
  std::vector<FormatOption> options() { return {{.key = "bits", .value = &bits, .least = 1, .most = 4}}; }

  // Returns log2(x) + 127 in quarters, rounded; 0 if x is below the least normal float.
  GW_HD static int quarters_of(float x) {
    const uint32_t exponent = float_bits(x) >> 23, fraction = float_bits(x) & 0x7fffffu;
    // The fractions of 2^(1/8), 2^(3/8), 2^(5/8), 2^(7/8).
    const uint32_t part = (fraction > 0x0b95c2u ? 1u : 0u) + (fraction > 0x25fed7u ? 1u : 0u) +
                          (fraction > 0x45672au ? 1u : 0u) + (fraction > 0x6ac0c7u ? 1u : 0u);
    const int quarters = exponent == 0 ? 0 : static_cast<int>(4u * exponent + part);
    return quarters > 4 * kLargestUnit ? 4 * kLargestUnit : quarters;
  }
  GW_HD static float scale_of(int unit, int q) {
    const int quarters = 4 * unit + q - kQuarters;
    if (q == 0 || quarters < 4) return 0.0f;
    const uint32_t part = static_cast<uint32_t>(quarters) & 3u;
    const uint32_t fraction = part == 0 ? 0 : part == 1 ? 0x1837f0u : part == 2 ? 0x3504f3u : 0x5744fdu;
    return bits_float(static_cast<uint32_t>(quarters) >> 2 << 23 | fraction);
  }

  // Returns the bits of a part whose scale is `above` quarters of an octave above the level at which parts
  // get none. Each bit lowers the squared error of a part by 2^(-above / 2) times a factor; the thresholds 1,
  // 4, 7, 11 and 14 are these factors' logarithms.
  GW_HD static int bits_for(int above) {
    const int some = (3 * above + 9) / 10;
    return some < 0 ? 0 : some > kMax ? kMax : some;
  }
  // Computes the parts of an encoded block from its scales.
  template <typename Lanes>
  GW_HD void allocate(const Lanes& lanes, const uint8_t* from, uint32_t* parts) const {
    const uint8_t* const scales = from + all_codes();
    const int all = all_bits();
    each_team(lanes, 1, [=](const auto& team, int) GW_HD_LAMBDA {
      unpack_codes<6>(team, scales, kParts, kParts,
                      [=](auto i, uint32_t code) GW_HD_LAMBDA { parts[i] = code; });
      const auto bits_at = [=](int i, int level) GW_HD_LAMBDA {
        const int q = static_cast<int>(parts[i] & 63u);
        return q == kMask ? 1 : bits_for(q - level);
      };
      // Levels at which all parts together get more bits than there are, or the most that they may have, and
      // at which they get at most as many.
      int over = -14, fits = kQuarters;
      GW_NO_UNROLL
      while (fits - over > 1) {
        const int level = (fits + over) >> 1;
        const float total =
            team.sum(kParts, [=](int i) GW_HD_LAMBDA { return static_cast<float>(bits_at(i, level)); });
        (total > static_cast<float>(all) ? over : fits) = level;
      }
      const int level = fits, next = over;
      const int spare = all - static_cast<int>(team.sum(kParts, [=](int i) GW_HD_LAMBDA {
                          return static_cast<float>(bits_at(i, level));
                        }));
      // The first parts that would get a bit at the next level get the spare bits.
      team.pick(
          kParts, [=](int i) GW_HD_LAMBDA { return bits_at(i, next) > bits_at(i, level); },
          [=](int k, int i) GW_HD_LAMBDA {
            if (k < spare) parts[i] |= 1u << 8;
          });
      team.each(kParts,
                [=](int i) GW_HD_LAMBDA { parts[i] += static_cast<uint32_t>(bits_at(i, level)) << 8; });
      team.each(1, [=](int) GW_HD_LAMBDA {
        uint32_t before = 0;
        GW_NO_UNROLL
        for (int i = 0; i < kParts; ++i) {
          const uint32_t word = parts[i];
          parts[i] = word | before << 16;
          before += word >> 8;
        }
      });
    });
  }

  // Returns a scale for rotated values: their root mean square, but at most kMaxOfMean times their mean
  // magnitude, so that an encode contracts.
  template <typename Lanes>
  GW_HD static float size_of(const Lanes& team, const float* values) {
    constexpr float kShare = 1.0f / kPart;
    const float mean = team.sum(
        kPart, [=](int i) GW_HD_LAMBDA { return bits_float(float_bits(values[i]) & 0x7fffffffu) * kShare; });
    const float per = mean >= 0x1p-126f ? 1.0f / mean : 0.0f;
    const float squares = team.sum(kPart, [=](int i) GW_HD_LAMBDA {
      const float x = values[i] * per;
      return x * x;
    });
    const float ratio = sqrtf(squares * kShare);
    return mean * (ratio > kMaxOfMean ? kMaxOfMean : ratio);
  }
  template <int kBits, typename Lanes>
  GW_HD static void encode_part(const Lanes& team, const float* values, float per, uint8_t* to) {
    pack_codes<kBits>(team, kPart, to, [=](auto i) GW_HD_LAMBDA {
      const uint32_t bits_of = float_bits(values[i]);
      const float magnitude = bits_float(bits_of & 0x7fffffffu);
      const uint32_t code = with_lloyd_max<kBits>(CodeOfMagnitude{unknown(magnitude * per)});
      return code | (bits_of >> 31) << (kBits - 1);
    });
  }
  template <int kBits, typename Lanes>
  GW_HD static void decode_part(const Lanes& team, const uint8_t* from, float scale, float* values) {
    constexpr uint32_t kSign = 1u << (kBits - 1);
    unpack_codes<kBits>(team, from, kPart, kPart, [=](auto i, uint32_t code) GW_HD_LAMBDA {
      const float x = scale * with_lloyd_max<kBits>(LevelOfCode{static_cast<float>(code & (kSign - 1u))});
      values[i] = (code & kSign) != 0 ? -x : x;
    });
    rotate_block_back(team, values, kPart, kPart);
  }

  template <typename Lanes>
  GW_HD void encode(const Lanes& lanes, const float* values, int, const uint16_t*, uint8_t* to,
                    float* rotated, const NoSink& = {}) const {
    [[maybe_unused]] uint32_t own[kParts];
    uint32_t* const parts = table(lanes, own);
    each_team(lanes, kParts, [=](const auto& team, int p) GW_HD_LAMBDA {
      const float* const x = values + kPart * p;
      const uint32_t largest =
          team.max(kPart, [=](int i) GW_HD_LAMBDA { return float_bits(x[i]) & 0x7fffffffu; });
      if (largest >= 0x7f800000u) {
        parts[p] = kNotFinite;
        return;
      }
      rotate_block(team, x, kPart, rotated + kPart * p);
      parts[p] = static_cast<uint32_t>(quarters_of(size_of(team, rotated + kPart * p)));
    });
    const uint32_t most =
        lanes.max(kParts, [=](int p) GW_HD_LAMBDA { return parts[p] == kNotFinite ? 0u : parts[p]; });
    const int unit = (static_cast<int>(most) + 3) / 4;
    uint8_t* const scales = to + all_codes();
    pack_codes<6>(lanes, kParts, scales, [=](int p) GW_HD_LAMBDA {
      const int q = static_cast<int>(parts[p]) + kQuarters - 4 * unit;
      return parts[p] == kNotFinite ? uint32_t{kMask} : static_cast<uint32_t>(parts[p] == 0 || q < 0 ? 0 : q);
    });
    scales[kScaleBytes] = static_cast<uint8_t>(unit);
    allocate(lanes, to, parts);
    const Part last{parts[kParts - 1]};
    const int used = last.at() + last.bits() * (kPart / 8);  // less than all, if many parts are masks
    lanes.each(all_codes() - used, [=](int i) GW_HD_LAMBDA { to[used + i] = 0; });
    each_team(lanes, kParts, [=](const auto& team, int p) GW_HD_LAMBDA {
      const Part part{parts[p]};
      const float scale = scale_of(unit, part.quarters()), per = scale > 0.0f ? 1.0f / scale : 0.0f;
      const float* const x = rotated + kPart * p;
      uint8_t* const at = to + part.at();
      if (part.quarters() == kMask) {
        const float* const given = values + kPart * p;
        return pack_codes<1>(team, kPart, at,
                             [=](auto i) GW_HD_LAMBDA { return is_finite(given[i]) ? 0u : 1u; });
      }
      switch (part.bits()) {
        case 0:
          return;
        case 1:
          return encode_part<1>(team, x, per, at);
        case 2:
          return encode_part<2>(team, x, per, at);
        case 3:
          return encode_part<3>(team, x, per, at);
        case 4:
          return encode_part<4>(team, x, per, at);
        default:
          return encode_part<5>(team, x, per, at);
      }
    });
  }
  template <typename Lanes>
  GW_HD void decode(const Lanes& lanes, const uint8_t* from, int count, float* values) const {
    [[maybe_unused]] uint32_t own[kParts];
    uint32_t* const parts = table(lanes, own);
    allocate(lanes, from, parts);
    const int unit = from[bytes() - 1];
    each_team(lanes, (count + kPart - 1) / kPart, [=](const auto& team, int p) GW_HD_LAMBDA {
      const Part part{parts[p]};
      const float scale = scale_of(unit, part.quarters());
      float* const to = values + kPart * p;
      const uint8_t* const at = from + part.at();
      if (part.quarters() == kMask) {
        return unpack_codes<1>(team, at, kPart, kPart, [=](auto i, uint32_t code) GW_HD_LAMBDA {
          to[i] = code != 0 ? bits_float(0x7fc00000u) : 0.0f;
        });
      }
      switch (scale > 0.0f ? part.bits() : 0) {
        case 0:
          return team.each(kPart, [=](int i) GW_HD_LAMBDA { to[i] = 0.0f; });
        case 1:
          return decode_part<1>(team, at, scale, to);
        case 2:
          return decode_part<2>(team, at, scale, to);
        case 3:
          return decode_part<3>(team, at, scale, to);
        case 4:
          return decode_part<4>(team, at, scale, to);
        default:
          return decode_part<5>(team, at, scale, to);
      }
    });
  }

 private:
  static constexpr uint32_t kNotFinite = 0xffffu;
  // Returns memory that all lanes share.
  template <typename Lanes>
  GW_HD static uint32_t* table(const Lanes& lanes, [[maybe_unused]] uint32_t* own) {
    if constexpr (requires { lanes.table(); }) {
      return lanes.table();
    } else {
      return own;
    }
  }
};

}  // namespace gradwire
