// The selection of largest values and the encoding of their positions on the host, for positions.h.
#pragma once

#include <algorithm>
#include <bit>
#include <functional>

#include "kernels/simd/vector.h"
#include "kernels/wire/positions.h"

namespace gradwire::host {

struct SelectingLane {
  // Narrows the candidates to few more than k by the upper 15 of the keys' 31 bits, then compares all bits.
  template <typename Key>
  GW_INLINE void pick_largest(int n, int k, const Key& key, float* places) const {
    alignas(64) int16_t upper[kMostKeys];
    alignas(64) uint8_t hits[kMostKeys];
    uint16_t at[kMostKeys];
    uint32_t keys[kMostKeys];
#pragma omp simd
    for (int i = 0; i < n; ++i) upper[i] = static_cast<int16_t>(key(i) >> 16);
    int16_t least = 0;
    for (int bit = 1 << 14; bit > 0; bit /= 2) {
      const auto tried = static_cast<int16_t>(least | bit);
      const int reach = reaching(upper, n, tried);
      if (reach >= k) least = tried;
      if (reach >= k && reach <= k + k / 4) break;
    }
#pragma omp simd
    for (int i = 0; i < n; ++i) hits[i] = upper[i] >= least ? 1 : 0;
    int all = 0;
    for (int begin = 0; begin < n; begin += 8) {
      uint64_t eight;
      memcpy(&eight, hits + begin, sizeof eight);
      for (; eight != 0; eight &= eight - 1) {
        const int i = begin + std::countr_zero(eight) / 8;
        at[all] = static_cast<uint16_t>(i);
        keys[all++] = key(i);
      }
    }
    uint32_t sorted[kMostKeys];
    std::copy_n(keys, all, sorted);
    std::nth_element(sorted, sorted + (k - 1), sorted + all, std::greater<>());
    const uint32_t last = sorted[k - 1];
    int equal = k;  // number of keys equal to `last` to select
#pragma omp simd reduction(- : equal)
    for (int j = 0; j < all; ++j) equal -= keys[j] > last ? 1 : 0;
    for (int j = 0, picked = 0; j < all && picked < k; ++j) {
      const int tie = keys[j] == last && equal > 0 ? 1 : 0;
      put_place(places, picked, at[j]);  // the next position overwrites the position of a key not selected
      picked += (keys[j] > last ? 1 : 0) + tie;
      equal -= tie;
    }
  }

  GW_INLINE void put_positions(const Positions& set, const float* places, uint8_t* to) const {
    const int k = set.k, low = set.low;
    BitWriter upper{to}, lows{to + set.upper_bytes()};
    for (int j = 0; j < k; ++j) upper.set((get_place(places, j) >> low) + j);
    upper.finish(set.upper_bytes());
    const uint64_t mask = (1u << low) - 1u;
    for (int j = 0; j < k; ++j) lows.put(static_cast<uint64_t>(get_place(places, j)) & mask, j * low, low);
    lows.finish(set.low_bytes());
  }

  template <typename Take>
  GW_INLINE void each_position(const Positions& set, const uint8_t* from, const Take& take) const {
    alignas(64) int32_t places[kMostKeys];
    const int bytes = set.upper_bytes(), low = set.low;
    int all = 0;
    for (int begin = 0; begin < bytes; begin += 8) {
      uint64_t word = 0;
      memcpy(&word, from + begin, static_cast<size_t>(bytes - begin < 8 ? bytes - begin : 8));
      const int here = std::min(set.k - all, std::popcount(word));
      for (int j = all; j < all + here; ++j, word &= word - 1)
        places[j] = 8 * begin + std::countr_zero(word) - j;
      all += here;
    }
    // Four bytes from the byte before the low bits are inside the block, and hold them for any shift.
    const uint8_t* const before = from + bytes - 1;
    const uint32_t mask = (1u << low) - 1u;
    for (int j = 0, at = 8; j < all; ++j, at += low) {
      uint32_t bits;
      memcpy(&bits, before + (at - 8) / 8, sizeof bits);
      take(j, places[j] << low | static_cast<int>(bits >> (8 + at % 8) & mask));
    }
  }

 private:
  static constexpr int kMostKeys = 4096;

  // Returns the number of keys that are at least `least`; n is a multiple of 64.
  GW_INLINE int reaching(const int16_t* keys, int n, int16_t least) const {
    using I16x16 = int16_t __attribute__((vector_size(32)));
    I16x16 sums[4] = {};
    for (int i = 0; i < n; i += 64) {
      for (int part = 0; part < 4; ++part) sums[part] -= load<I16x16>(keys + i + 16 * part) >= least;
    }
    alignas(32) int16_t lanes[16];
    store(lanes, (sums[0] + sums[1]) + (sums[2] + sums[3]));
    int all = 0;
    for (const int16_t lane : lanes) all += lane;
    return all;
  }

  // Writes ascending bits of a string, a word at a time.
  struct BitWriter {
    uint8_t* to;
    uint64_t word = 0;
    int begin = 0;  // number of the word's first bit
    GW_INLINE void set(int bit) {
      while (bit - begin >= 64) next(0);
      word |= uint64_t{1} << (bit - begin);
    }
    // Writes `bits`, of `n` bits, at bit number `at`.
    GW_INLINE void put(uint64_t bits, int at, int n) {
      const int shift = at - begin;  // at most 64
      if (shift + n <= 64) {
        word |= bits << shift;
      } else {
        word |= shift < 64 ? bits << shift : 0;
        next(bits >> (64 - shift));
      }
    }
    GW_INLINE void next(uint64_t rest) {
      memcpy(to + begin / 8, &word, sizeof word);
      word = rest;
      begin += 64;
    }
    // Ends the string, which has `bytes` bytes.
    GW_INLINE void finish(int bytes) {
      for (int left = bytes - begin / 8; left > 0; left -= 8) {
        memcpy(to + bytes - left, &word, static_cast<size_t>(left < 8 ? left : 8));
        word = 0;
      }
    }
  };
};

}  // namespace gradwire::host
