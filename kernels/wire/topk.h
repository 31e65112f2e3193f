// Chunked top-k: of each block of `of` values, the k values of largest magnitude, with their positions in 16
// bits. Of equal magnitudes, the value at the lower position is sent. Every hop selects again, so the bytes
// do not depend on the number of ranks; values that are not sent stay in the residual. Without error feedback
// most of a gradient is lost.
//
// Values are sent as FP32, BF16, 8-bit integers with an FP32 scale per block, or in 2 bits: a sign, and
// whether the magnitude is above the mean of the selected magnitudes. The means of the magnitudes above and
// below this mean are sent in FP32. Non-finite values are selected first, and marked as NaN at their
// position.
#pragma once

#include <string>
#include <type_traits>

#include "kernels/math/fp8.h"
#include "kernels/wire/block.h"
#include "kernels/wire/codes.h"

namespace gradwire {

struct TopK {
  enum Values { kFloat, kHalf, kByte, kPair };
  int k = 64;
  int of = 4096;
  int kind = kHalf;

  static constexpr int kMaxBlock = 4096;
  static constexpr const char* kSummary = "the 64 largest of 4096 values in BF16, and their places";
  static constexpr const char* kSource =
      "Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017, in blocks";
  static constexpr Rounding kRounding = Rounding::nearest;
  static constexpr bool kStochastic = false, kMasks = false;
  static constexpr bool kSelects = true;
  static constexpr Rotation kRotation = Rotation::never;
  static constexpr std::array kExamples = {"k=16,of=256,values=fp32", "values=int8", "values=int2"};

  GW_HD int block() const { return of; }
  GW_HD int value_bytes() const {
    return kind == kFloat ? 4 * k : kind == kHalf ? 2 * k : kind == kByte ? k + 4 : (k + 3) / 4 + 8;
  }
  GW_HD int bytes() const { return 2 * k + value_bytes(); }
  double gaussian_error(bool) const { return k == 64 && of == 4096 ? (kind == kPair ? 0.882 : 0.881) : 0; }
  // Returns the bound of the squared error. With values of two magnitudes, at least the mean of the selected
  // magnitudes is sent.
  double error_bound(bool) const { return 1 - static_cast<double>(kind == kPair ? 1 : k) / of; }
  std::vector<FormatOption> options() {
    return {{.key = "k", .value = &k, .least = 1, .most = kMaxBlock},
            {.key = "of", .value = &of, .least = 64, .most = kMaxBlock, .power_of_two = true},
            {.key = "values", .value = &kind, .words = {"fp32", "bf16", "int8", "int2"}}};
  }
  std::string problem() const {
    return k <= of ? "" : "k=" + std::to_string(k) + " is more than of=" + std::to_string(of);
  }

  GW_HD static uint32_t magnitude(const float* values, int i) { return float_bits(values[i]) & 0x7fffffffu; }
  // Returns the position of the j-th selected value. Positions take 12 bits; the top bit marks NaN.
  GW_HD static int place(const uint8_t* from, int j) { return from[2 * j] | (from[2 * j + 1] & 0x0f) << 8; }
  GW_HD static bool is_nan(const uint8_t* from, int j) { return (from[2 * j + 1] & 0x80) != 0; }

  template <typename Lanes, typename Sink = NoSink>
  GW_HD void encode(const Lanes& lanes, const float* values, int, const uint16_t*, uint8_t* to,
                    const Sink& sink = {}) const {
    pick_largest(
        lanes, of, k, [=](int i) GW_HD_LAMBDA { return magnitude(values, i); },
        [=](int j, int i) GW_HD_LAMBDA {
          to[2 * j] = static_cast<uint8_t>(i);
          to[2 * j + 1] = static_cast<uint8_t>(i >> 8 | (is_finite(values[i]) ? 0 : 0x80));
        });
    put_values(lanes, values, to, to + 2 * k);
    if constexpr (!std::is_same_v<Sink, NoSink>) {
      lanes.each(of, [=](int i) GW_HD_LAMBDA { sink.template put<false>(i, 0.0f); });
      for (int j = 0; j < k; ++j) sink.template put<false>(place(to, j), value_of(to + 2 * k, j));
    }
  }

  template <typename Lanes>
  GW_HD void put_values(const Lanes& lanes, const float* values, const uint8_t* places, uint8_t* to) const {
    if (kind == kFloat) {
      lanes.each(k, [=](int j) GW_HD_LAMBDA { put_float(to + 4 * j, values[place(places, j)]); });
    } else if (kind == kHalf) {
      lanes.each(k, [=](int j) GW_HD_LAMBDA {
        const uint16_t half = float_to_bf16_nearest(values[place(places, j)]);
        to[2 * j] = static_cast<uint8_t>(half);
        to[2 * j + 1] = static_cast<uint8_t>(half >> 8);
      });
    } else if (kind == kByte) {
      const float most = bits_float(
          lanes.max(k, [=](int j) GW_HD_LAMBDA { return finite_magnitude_bits(values[place(places, j)]); }));
      const float inverse = most >= 0x1p-119f ? 127.0f / most : 0.0f;
      put_float(to + k, most);
      lanes.each(k, [=](int j) GW_HD_LAMBDA {
        const float x = values[place(places, j)] * inverse;
        const uint32_t code = round_magnitude(bits_float(finite_magnitude_bits(x)), -1);
        to[j] = static_cast<uint8_t>(x < 0.0f ? 0u - code : code);
      });
    } else {
      put_pairs(lanes, values, places, to);
    }
  }
  template <typename Lanes>
  GW_HD void put_pairs(const Lanes& lanes, const float* values, const uint8_t* places, uint8_t* to) const {
    const int all = k;
    const auto size_of = [=](int j) GW_HD_LAMBDA {
      return bits_float(finite_magnitude_bits(values[place(places, j)]));
    };
    // Scale before summing, so that the sum does not overflow.
    const float share = 1.0f / static_cast<float>(all);
    const float mean = lanes.sum(all, [=](int j) GW_HD_LAMBDA { return size_of(j) * share; });
    const auto upper = [=](int j) GW_HD_LAMBDA { return size_of(j) > mean; };
    const int above = lanes.count(all, upper), below = all - above;
    const float share_above = above > 0 ? 1.0f / static_cast<float>(above) : 0.0f;
    const float share_below = below > 0 ? 1.0f / static_cast<float>(below) : 0.0f;
    put_float(to + (k + 3) / 4,
              lanes.sum(all, [=](int j) GW_HD_LAMBDA { return upper(j) ? 0.0f : size_of(j) * share_below; }));
    put_float(to + (k + 3) / 4 + 4,
              lanes.sum(all, [=](int j) GW_HD_LAMBDA { return upper(j) ? size_of(j) * share_above : 0.0f; }));
    lanes.each((k + 3) / 4, [=](int byte) GW_HD_LAMBDA {
      uint32_t codes = 0;
      for (int j = 4 * byte; j < 4 * byte + 4 && j < all; ++j) {
        const uint32_t sign = float_bits(values[place(places, j)]) >> 31;
        codes |= ((upper(j) ? 1u : 0u) | sign << 1) << (2 * (j % 4));
      }
      to[byte] = static_cast<uint8_t>(codes);
    });
  }

  GW_HD float value_of(const uint8_t* from, int j) const {
    if (kind == kFloat) return get_float(from + 4 * j);
    if (kind == kHalf) return bf16_to_float(static_cast<uint16_t>(from[2 * j] | from[2 * j + 1] << 8));
    if (kind == kByte) {
      return get_float(from + k) * (1.0f / 127.0f) * static_cast<float>(static_cast<int8_t>(from[j]));
    }
    const uint32_t code = static_cast<uint32_t>(from[j / 4]) >> (2 * (j % 4));
    const float mean = get_float(from + (k + 3) / 4 + 4 * static_cast<int>(code & 1u));
    const float most = 0x1.fffffep127f, x = mean > most ? most : mean;
    return (code & 2u) != 0 ? -x : x;
  }
  template <typename Lanes>
  GW_HD void decode(const Lanes& lanes, const uint8_t* from, int count, float* values) const {
    lanes.each(count, [=](int i) GW_HD_LAMBDA { values[i] = 0.0f; });
    const auto self = *this;
    lanes.each(k, [=](int j) GW_HD_LAMBDA {
      const int i = place(from, j);
      const float x = is_nan(from, j) ? bits_float(0x7fc00000u) : self.value_of(from + 2 * self.k, j);
      if (i < count) values[i] = x;
    });
  }
};

}  // namespace gradwire
