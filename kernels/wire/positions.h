// Sets of k ascending positions below a power of two, in Elias-Fano's encoding. The size depends only on k
// and the range. 64 positions of 4096 take 8 bits each; the least possible is 7.36.
//
// With l = floor(log2(range / k)), a position p has l low bits and the upper part p >> l. Position number j
// sets bit (p >> l) + j of the first field, of k + (range >> l) bits. The second field holds the low bits of
// all positions, in order. A field is a string of bits that begins at the lowest bit of its first byte; its
// last byte is filled with zeros.
#pragma once

#include <cstdint>

#include "kernels/math/small_float.h"

namespace gradwire {

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

}  // namespace gradwire
