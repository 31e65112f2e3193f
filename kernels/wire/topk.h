// Chunked top-k: of each block of `of` values, the k values of largest magnitude, with their positions.
// Of equal magnitudes, the value at the lower position is sent. Every hop selects again, so
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

#include <cstdint>
#include <string>
#include <type_traits>

#include "kernels/math/small_float.h"
#include "kernels/wire/block.h"
#include "kernels/wire/codes.h"

namespace gradwire {

// Sets of k ascending positions below a power of two, in Elias-Fano's encoding. The size depends only on k
// and the range. 64 positions of 4096 take 8 bits each; the least possible is 7.36.
//
// With l = floor(log2(range / k)), a position p has l low bits and the upper part p >> l. Position number j
// sets bit (p >> l) + j of the first field, of k + (range >> l) bits. The second field holds the low bits of
// all positions, in order. A field is a string of bits that begins at the lowest bit of its first byte; its
// last byte is filled with zeros.

struct Positions {
  int k, range;
  int low;  // l

  GW_HD Positions(int its_k, int its_range) : k(its_k), range(its_range), low(0) {
    while (k << (low + 1) <= range) ++low;
  }
  GW_HD int upper_bits() const { return k + (range >> low); }
  GW_HD int upper_bytes() const { return (upper_bits() + 7) / 8; }
  GW_HD int low_bytes() const { return (k * low + 7) / 8; }
  GW_HD int bytes() const { return upper_bytes() + low_bytes(); }
  // Returns the low bits of position number j. May read two bytes after the field, from a block's values.
  GW_HD int low_part(const uint8_t* lows, int j) const {
    const int at = j * low;
    const uint8_t* const from = lows + at / 8;
    const uint32_t bits = static_cast<uint32_t>(from[0]) | static_cast<uint32_t>(from[1]) << 8 |
                          static_cast<uint32_t>(from[2]) << 16;
    return static_cast<int>(bits >> (at % 8)) & ((1 << low) - 1);
  }
};

// Positions in scratch memory, as the bits of floats.
GW_HD void put_place(float* places, int j, int position) {
  places[j] = bits_float(static_cast<uint32_t>(position));
}
GW_HD int get_place(const float* places, int j) {
  return static_cast<int>(float_bits(places[j]));
}

// The keys of values, of 31 bits: their magnitudes, which have the same order as integers.
struct Magnitudes {
  const float* values;
  GW_HD uint32_t operator()(int i) const { return float_bits(values[i]) & 0x7fffffffu; }
};

// Selects the k largest of n keys of 31 bits, of equal keys the lower positions. Writes their positions into
// places[0..k), ascending. Lanes may override this.
template <typename Lanes, typename Key>
GW_HD void pick_largest(const Lanes& lanes, int n, int k, const Key& key, float* places) {
  if constexpr (requires { lanes.pick_largest(n, k, key, places); }) {
    lanes.pick_largest(n, k, key, places);
  } else {
    uint32_t least = 0;  // the k-th largest
    for (int bit = 30; bit >= 0; --bit) {
      const uint32_t tried = least | (1u << bit);
      const int reach = lanes.count(n, [=](int i) GW_HD_LAMBDA { return key(i) >= tried; });
      if (reach >= k) least = tried;
      if (reach == k) {  // exactly k: the k-th largest is the least of these keys
        least = ~lanes.max(n, [=](int i) GW_HD_LAMBDA { return key(i) >= tried ? ~key(i) : 0u; });
        break;
      }
    }
    const int equal = k - lanes.count(n, [=](int i) GW_HD_LAMBDA { return key(i) > least; });
    lanes.pick(
        n, [=](int i) GW_HD_LAMBDA { return key(i) == least; },
        [=](int j, int i) GW_HD_LAMBDA {
          if (j == equal - 1) put_place(places, 0, i);
        });
    // All lanes read the position of the last selected key that equals `least` before pick() writes.
    const int last = get_place(places, 0);
    lanes.pick(
        n,
        [=](int i) GW_HD_LAMBDA {
          const uint32_t x = key(i);
          return x > least || (x == least && i <= last);
        },
        [=](int j, int i) GW_HD_LAMBDA { put_place(places, j, i); });
  }
}

// Encodes places[0..k). Lanes may override this and each_position().
template <typename Lanes>
GW_HD void put_positions(const Lanes& lanes, const Positions& set, const float* places, uint8_t* to) {
  if constexpr (requires { lanes.put_positions(set, places, to); }) {
    lanes.put_positions(set, places, to);
  } else {
    const int k = set.k, low = set.low;
    const auto bit_of = [=](int j) GW_HD_LAMBDA { return (get_place(places, j) >> low) + j; };
    lanes.each(set.upper_bytes(), [=](int byte) GW_HD_LAMBDA {
      int j = 0;  // the first position whose bit is not in an earlier byte
      GW_NO_UNROLL
      for (int step = 4096; step > 0; step /= 2) {
        if (j + step <= k && bit_of(j + step - 1) < 8 * byte) j += step;
      }
      uint32_t bits = 0;
      GW_NO_UNROLL
      for (; j < k && bit_of(j) < 8 * byte + 8; ++j) bits |= 1u << (bit_of(j) - 8 * byte);
      to[byte] = static_cast<uint8_t>(bits);
    });
    uint8_t* const lows = to + set.upper_bytes();
    lanes.each(set.low_bytes(), [=](int byte) GW_HD_LAMBDA {
      uint32_t bits = 0;
      GW_NO_UNROLL
      for (int j = 8 * byte / low; j < k && j * low < 8 * byte + 8; ++j) {
        const uint32_t part = static_cast<uint32_t>(get_place(places, j)) & ((1u << low) - 1u);
        const int shift = j * low - 8 * byte;
        bits |= shift < 0 ? part >> -shift : part << shift;
      }
      lows[byte] = static_cast<uint8_t>(bits);
    });
  }
}

// Calls take(j, position) for each position. Bytes that no encoder writes give fewer calls, or positions at
// or above the range, but j < k.
template <typename Lanes, typename Take>
GW_HD void each_position(const Lanes& lanes, const Positions& set, const uint8_t* from, const Take& take) {
  if constexpr (requires { lanes.each_position(set, from, take); }) {
    lanes.each_position(set, from, take);
  } else {
    const uint8_t* const lows = from + set.upper_bytes();
    lanes.pick(
        set.upper_bits(), [=](int bit) GW_HD_LAMBDA { return ((from[bit / 8] >> (bit % 8)) & 1) != 0; },
        [=](int j, int bit) GW_HD_LAMBDA {
          if (j < set.k) take(j, (bit - j) << set.low | set.low_part(lows, j));
        });
  }
}

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

  // `places`: room for block() floats.
  template <typename Lanes, typename Sink = NoSink>
  GW_HD void encode(const Lanes& lanes, const float* values, int, const uint16_t*, uint8_t* to, float* places,
                    const Sink& sink = {}) const {
    pick_largest(lanes, of, k, Magnitudes{values}, places);
    put_positions(lanes, positions(), places, to);
    uint8_t* const codes = to + positions().bytes();
    put_values(lanes, values, places, codes);
    if constexpr (!std::is_same_v<Sink, NoSink>) {
      // If a value that is sent is finite, all values that are not sent are finite.
      if (!sink.in_place() || !is_finite(values[get_place(places, 0)]))
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
