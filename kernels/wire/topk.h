// Chunked top-k: of each block of `of` values, the k values of largest magnitude, with their positions
// (positions.h). Of equal magnitudes, the value at the lower position is sent. Every hop selects again, so
// the bytes do not depend on the number of ranks; values that are not sent stay in the residual. Without
// error feedback most of a gradient is lost.
//
// Values are sent as FP32, BF16, 8-bit integers with an FP32 scale per block, or in 2 bits: a sign, and
// whether the magnitude is above the mean of the selected magnitudes. The means of the magnitudes above and
// below this mean are sent in FP32.
//
// Non-finite values are selected first. The integer -128 is NaN. With 2 bits, the upper mean of a block with
// non-finite values is NaN: these values take its code, and all finite values the other.
#pragma once

#include <string>
#include <type_traits>

#include "kernels/math/small_float.h"
#include "kernels/wire/block.h"
#include "kernels/wire/codes.h"
#include "kernels/wire/positions.h"

namespace gradwire {

struct TopK {
  enum Values { kFloat, kHalf, kByte, kPair };
  int k = 64;
  int of = 4096;
  int kind = kHalf;

  static constexpr int kMaxBlock = 4096;
  static constexpr const char* kSummary = "the 64 largest of 4096 values in BF16, and their positions";
  static constexpr const char* kSource =
      "Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017, in blocks";
  static constexpr Rounding kRounding = Rounding::nearest;
  static constexpr bool kStochastic = false, kMasks = false;
  static constexpr bool kSelects = true;
  static constexpr Rotation kRotation = Rotation::never;
  static constexpr std::array kExamples = {"k=41,of=256,values=fp32", "values=int8", "values=int2"};

  GW_HD int block() const { return of; }
  GW_HD int value_bytes() const {
    return kind == kFloat ? 4 * k : kind == kHalf ? 2 * k : kind == kByte ? k + 4 : (k + 3) / 4 + 8;
  }
  GW_HD Positions positions() const { return {k, of}; }
  GW_HD int bytes() const { return positions().bytes() + value_bytes(); }
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
  // `places`: room for block() floats.
  template <typename Lanes, typename Sink = NoSink>
  GW_HD void encode(const Lanes& lanes, const float* values, int, const uint16_t*, uint8_t* to, float* places,
                    const Sink& sink = {}) const {
    pick_largest(
        lanes, of, k, [=](int i) GW_HD_LAMBDA { return magnitude(values, i); }, places);
    put_positions(lanes, positions(), places, to);
    uint8_t* const codes = to + positions().bytes();
    put_values(lanes, values, places, codes);
    if constexpr (!std::is_same_v<Sink, NoSink>) {
      lanes.each(of, [=](int i) GW_HD_LAMBDA { sink.template put<false>(i, 0.0f); });
      with_values(codes, [=, all = k](const auto& value) GW_HD_LAMBDA {
        for (int j = 0; j < all; ++j) sink.template put<false>(get_place(places, j), value(j));
      });
    }
  }

  template <typename Lanes>
  GW_HD void put_values(const Lanes& lanes, const float* values, const float* places, uint8_t* to) const {
    const auto at = [=](int j) GW_HD_LAMBDA { return values[get_place(places, j)]; };
    if (kind == kFloat) {
      lanes.each(k, [=](int j) GW_HD_LAMBDA { put_float(to + 4 * j, at(j)); });
    } else if (kind == kHalf) {
      lanes.each(k, [=](int j) GW_HD_LAMBDA {
        const uint16_t half = float_to_bf16_nearest(at(j));
        to[2 * j] = static_cast<uint8_t>(half);
        to[2 * j + 1] = static_cast<uint8_t>(half >> 8);
      });
    } else if (kind == kByte) {
      const float most =
          bits_float(lanes.max(k, [=](int j) GW_HD_LAMBDA { return finite_magnitude_bits(at(j)); }));
      const float inverse = most >= 0x1p-119f ? 127.0f / most : 0.0f;
      put_float(to + k, most);
      lanes.each(k, [=](int j) GW_HD_LAMBDA {
        const float value = at(j), x = value * inverse;
        const uint32_t code = round_magnitude(bits_float(finite_magnitude_bits(x)), -1);
        to[j] = static_cast<uint8_t>(!is_finite(value) ? 0x80u : x < 0.0f ? 0u - code : code);
      });
    } else {
      put_pairs(lanes, at, to);
    }
  }
  template <typename Lanes, typename At>
  GW_HD void put_pairs(const Lanes& lanes, const At& at, uint8_t* to) const {
    const int all = k;
    const auto bits_of = [=](int j) GW_HD_LAMBDA { return float_bits(at(j)) & 0x7fffffffu; };
    const auto size_of = [=](int j) GW_HD_LAMBDA { return bits_float(finite_magnitude_bits(at(j))); };
    const bool finite = lanes.max(all, bits_of) < 0x7f800000u;
    // Scale before summing, so that the sum does not overflow.
    const float share = 1.0f / static_cast<float>(all);
    const float mean = lanes.sum(all, [=](int j) GW_HD_LAMBDA { return size_of(j) * share; });
    const uint32_t limit = finite ? float_bits(mean) : 0x7f7fffffu;
    const auto upper = [=](int j) GW_HD_LAMBDA { return bits_of(j) > limit; };
    const int above = lanes.count(all, upper), below = all - above;
    const float share_above = above > 0 ? 1.0f / static_cast<float>(above) : 0.0f;
    const float share_below = below > 0 ? 1.0f / static_cast<float>(below) : 0.0f;
    put_float(to + (k + 3) / 4,
              lanes.sum(all, [=](int j) GW_HD_LAMBDA { return upper(j) ? 0.0f : size_of(j) * share_below; }));
    const float large =
        lanes.sum(all, [=](int j) GW_HD_LAMBDA { return upper(j) ? size_of(j) * share_above : 0.0f; });
    put_float(to + (k + 3) / 4 + 4, finite ? large : bits_float(0x7fc00000u));
    lanes.each((k + 3) / 4, [=](int byte) GW_HD_LAMBDA {
      uint32_t codes = 0;
      for (int j = 4 * byte; j < 4 * byte + 4 && j < all; ++j) {
        const uint32_t sign = float_bits(at(j)) >> 31;
        codes |= ((upper(j) ? 1u : 0u) | sign << 1) << (2 * (j % 4));
      }
      to[byte] = static_cast<uint8_t>(codes);
    });
  }

  GW_HD float value_of(int its_kind, const uint8_t* from, int j) const {
    if (its_kind == kFloat) return get_float(from + 4 * j);
    if (its_kind == kHalf) return bf16_to_float(static_cast<uint16_t>(from[2 * j] | from[2 * j + 1] << 8));
    if (its_kind == kByte) {
      const float unit = from[j] == 0x80 ? bits_float(0x7fc00000u) : get_float(from + k) * (1.0f / 127.0f);
      return unit * static_cast<float>(static_cast<int8_t>(from[j]));
    }
    const uint32_t code = static_cast<uint32_t>(from[j / 4]) >> (2 * (j % 4));
    const float mean = get_float(from + (k + 3) / 4 + 4 * static_cast<int>(code & 1u));
    const float most = 0x1.fffffep127f, x = mean > most ? most : mean;
    return (code & 2u) != 0 ? -x : x;
  }
  // Calls body(value), with value(j) the j-th value. On the host, the loops in `body` do not test the kind.
  // On the device, four loops would take registers.
  template <typename Body>
  GW_HD void with_values(const uint8_t* from, const Body& body) const {
    const auto self = *this;
#ifdef __CUDA_ARCH__
    body([=](int j) GW_HD_LAMBDA { return self.value_of(self.kind, from, j); });
#else
    if (kind == kFloat) return body([=](int j) GW_HD_LAMBDA { return self.value_of(kFloat, from, j); });
    if (kind == kHalf) return body([=](int j) GW_HD_LAMBDA { return self.value_of(kHalf, from, j); });
    if (kind == kByte) return body([=](int j) GW_HD_LAMBDA { return self.value_of(kByte, from, j); });
    body([=](int j) GW_HD_LAMBDA { return self.value_of(kPair, from, j); });
#endif
  }
  template <typename Lanes>
  GW_HD void decode(const Lanes& lanes, const uint8_t* from, int count, float* values) const {
    lanes.each(count, [=](int i) GW_HD_LAMBDA { values[i] = 0.0f; });
    const Positions set = positions();
    with_values(from + set.bytes(), [=](const auto& value) GW_HD_LAMBDA {
      each_position(lanes, set, from, [=](int j, int i) GW_HD_LAMBDA {
        if (i < count) values[i] = value(j);
      });
    });
  }
};

}  // namespace gradwire
