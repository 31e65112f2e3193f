// Integers on the wire: codes from -m to m, m = 2^(bits - 1) - 1, times the block's unit.
//
// 8 and 4 bits: the unit is the largest magnitude / m in FP32, or, with scale=pow2, the next power of two,
// stored as one byte, exponent + 127 (OCP Microscaling's E8M0). Relative to the largest magnitude the error
// is uniform, u^2 / 12 for a unit u. 2 bits: -1, 0 and 1 times 1.534 mean |x|, the best three levels for a
// Gaussian: error 0.19; larger values are clamped, so unbiased rounding is not possible.
//
// With a power of two, wire + residual == S exactly with round to nearest; otherwise the equation holds up to
// FP32 rounding. NaN and Inf are both sent as NaN, code -m - 1; NaN and Inf do not affect the unit.
#pragma once

#include "kernels/math/small_float.h"
#include "kernels/wire/block.h"
#include "kernels/wire/codes.h"

namespace gradwire {

// Returns byte k of a word times 2^-133: as the third byte of a float, whose multiples of 2^-133 continue
// beyond the least normal number.
GW_HD float byte_fraction(uint32_t word, uint32_t k) {
#ifdef __CUDA_ARCH__
  return bits_float(__byte_perm(word, 0u, 0x4044u + 0x100u * k));
#else
  return bits_float((word >> (8 * k) & 0xffu) << 16);
#endif
}

template <int kBits>
struct Int {
  int size = 128;
  int fp32_scale = kBits == 8 ? 0 : 1;

  static constexpr int kMaxBlock = 512;
  static constexpr int kMax = (1 << (kBits - 1)) - 1;
  static constexpr uint32_t kMask = (1u << kBits) - 1u;
  static constexpr const char* kSummary = kBits == 8   ? "8-bit integers, a power-of-two unit per 128 values"
                                          : kBits == 4 ? "4-bit integers, an FP32 unit per 128 values"
                                                       : "-1, 0 or 1 times an FP32 unit per 128 values";
  static constexpr const char* kSource = kBits == 8 ? "MXINT8 of OCP's Microscaling Formats, in larger blocks"
                                         : kBits == 4
                                             ? "Dettmers, 8-Bit Approximations for Parallelism in Deep "
                                               "Learning, 2016, in 4 bits"
                                             : "Li et al., Ternary Weight Networks, 2016";
  static constexpr Rounding kRounding = Rounding::nearest;
  static constexpr bool kStochastic = kBits > 2, kMasks = false;
  static constexpr Rotation kRotation = Rotation::optional;
  static constexpr std::array kExamples = {kBits == 8 ? "block=32,scale=fp32" : "block=512,scale=pow2"};

  GW_HD int block() const { return size; }
  GW_HD int scale_bytes() const { return fp32_scale != 0 ? 4 : 1; }
  GW_HD int bytes() const { return code_bytes<kBits>(size) + scale_bytes(); }
  double gaussian_error(bool rotated) const {
    // A power-of-two unit is 1 to 2 times the least possible unit; rotation changes the ratio, so the error
    // is unknown.
    if (*this != Int() || (rotated && fp32_scale == 0)) return 0;
    return kBits == 8 ? 8.34e-5 : kBits == 4 ? 1.4e-2 : 0.19;
  }
  // Bounds the squared error. A unit is 1 / kMax of the largest magnitude, or up to twice as large. The
  // bound of int2 follows from its scale, a mean.
  double error_bound(bool stochastic) const {
    if (kBits == 2) return 1 - 1.534 * (2 - 1.534) / size;
    const double error = (fp32_scale != 0 ? 1.0 : 2.0) / kMax / (stochastic ? 1 : 2);
    return error * error;
  }
  std::vector<FormatOption> options() {
    return {block_option(&size), {.key = "scale", .value = &fp32_scale, .words = {"pow2", "fp32"}}};
  }
  bool operator==(const Int&) const = default;

  // Returns the least k, as k + 127, with largest <= kMax * 2^k; kMax = (2 - 2^(2 - kBits)) * 2^(kBits -
  // 2). Where kMax * 2^k overflows a float, larger values saturate.
  GW_HD static uint8_t unit_byte(uint32_t largest_bits) {
    constexpr uint32_t kFraction = 0x7fffffu & ~((1u << (25 - kBits)) - 1u);  // the fraction bits of kMax
    constexpr int32_t kLast = kBits == 2 ? 253 : 256 - kBits;  // its inverse must also be a normal number
    int32_t byte = static_cast<int32_t>(largest_bits >> 23) - (kBits - 2);
    byte += (largest_bits & 0x7fffffu) > kFraction ? 1 : 0;
    byte = byte > kLast ? kLast : byte;
    return static_cast<uint8_t>(byte < 1 ? 1 : byte);
  }

  // Returns the code of a number of units; -kMax - 1 for NaN. `random` has 16 random bits; if negative,
  // rounds to nearest.
  template <bool kFinite>
  GW_HD static int32_t code_of(float units, int32_t random) {
    // Random bits shift by less than a half in either direction, so integers are unchanged.
    const float shifted =
        random < 0 ? units : units + (static_cast<float>(random) * 0x1p-16f - (0.5f - 0x1p-17f));
    // Near 1.5 * 2^23 floats are integers, so adding this constant rounds.
    const float large = 12582912.0f;
    int32_t code =
        static_cast<int32_t>(float_bits(shifted + large)) - static_cast<int32_t>(float_bits(large));
    code = code > kMax ? kMax : code;
    code = code < -kMax ? -kMax : code;
    return kFinite || is_finite(units) ? code : -kMax - 1;
  }
  GW_HD static float value_of(int32_t code, float unit) {
    return code == -kMax - 1 ? bits_float(0x7fc00000u) : unit * static_cast<float>(code);
  }

  // Returns the least value that the largest code must represent. `largest` is the largest finite magnitude,
  // as bits.
  template <typename Lanes, typename Values>
  GW_HD static float scaled_value(const Lanes& lanes, Values values, int count, uint32_t largest) {
    if constexpr (kBits > 2) return bits_float(largest);
    const float share = 1.0f / static_cast<float>(count);
    const float mean = lanes.sum(
        count, [=](auto i) GW_HD_LAMBDA { return bits_float(finite_magnitude_bits(values[i])) * share; });
    return mean < 2e38f ? 1.534f * mean : mean;
  }

  template <typename Lanes, typename Values, typename Random, typename Sink = NoSink>
  GW_HD void encode(const Lanes& lanes, Values values, int count, Random random, uint8_t* to,
                    const Sink& sink = {}) const {
    const Largest largest(lanes, values, count);
    const float scaled = scaled_value(lanes, values, count, largest.bits);
    uint8_t* const at = to + code_bytes<kBits>(size);
    float unit, inverse;
    if (fp32_scale != 0) {
      unit = scaled / static_cast<float>(kMax);
      if (!is_finite(unit * static_cast<float>(kMax))) unit = bits_float(float_bits(unit) - 1u);
      inverse = unit >= 0x1p-126f ? 1.0f / unit : 0.0f;
      put_float(at, unit);
    } else {
      *at = unit_byte(float_bits(scaled));
      unit = fp8_scale(*at);
      inverse = fp8_inverse_scale(*at);
    }
    const auto pack = [=, this](auto finite, const auto& draw) GW_HD_LAMBDA {
      constexpr bool kFinite = finite;
      pack_codes<kBits>(lanes, size, to, [=](auto i) GW_HD_LAMBDA {
        const int32_t code = code_of<kFinite>(values[i] * inverse, draw(i));
        sink.template put<kFinite>(i, kFinite ? unit * static_cast<float>(code) : value_of(code, unit));
        return static_cast<uint32_t>(code) & kMask;
      });
    };
    if (largest.finite)
      with_draws(random, [=](const auto& draw) GW_HD_LAMBDA { pack(std::true_type(), draw); });
    else
      pack(std::false_type(), [=](auto i) GW_HD_LAMBDA { return draw_of(random, i); });
  }

  template <typename Lanes>
  GW_HD float unit_of(const Lanes& lanes, const uint8_t* from) const {
    const uint8_t* const at = from + code_bytes<kBits>(size);
    return fp32_scale != 0 ? get_float(lanes, at) : fp8_scale(*at);
  }
  template <typename Lanes, typename Values>
  GW_HD void decode(const Lanes& lanes, const uint8_t* from, int count, Values values) const {
    const float unit = unit_of(lanes, from);
    unpack_codes<kBits>(lanes, from, size, count, [=](auto i, uint32_t code) GW_HD_LAMBDA {
      values[i] = value_of(static_cast<int32_t>(code << (32 - kBits)) >> (32 - kBits), unit);
    });
  }
  // Returns whether no code is NaN, and add() rounds unit * code once, as value_of().
  template <typename Lanes>
  GW_HD bool adds(const Lanes& lanes, const uint8_t* from, float) const {
    uint32_t fours[Lanes::kRows] = {};
    const bool numbers = lanes.template load_integers<kBits>(from, fours);
    return (float_bits(unit_of(lanes, from)) - (1u << 23) < (129u - kBits) << 23) & numbers;
  }
  template <typename Lanes>
  GW_HD void add(const Lanes& lanes, const uint8_t* from, float scale, float* sums) const {
    const float unit = unit_of(lanes, from);
    uint32_t fours[Lanes::kRows] = {};
    lanes.template load_integers<kBits>(from, fours);
    // Undoes byte_fraction() of the upper bits of a byte.
    const float times = bits_float(float_bits(unit) + ((125u + kBits) << 23));
    for (const uint32_t codes : fours) {
      for (uint32_t k = 0; k < 4; ++k, ++sums)
        *sums =
            fmaf(scale, fmaf(byte_fraction(codes, k), times, unit * -static_cast<float>(kMax + 1)), *sums);
    }
  }
};

using Int8 = Int<8>;
using Int4 = Int<4>;
using Int2 = Int<2>;

}  // namespace gradwire
