// The selection of largest values and the encoding of their positions on the host, for topk.h.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/simd/vector.h"
#include "kernels/wire/block_vectors.h"
#include "kernels/wire/topk.h"

namespace gradwire::host {

// Positions of the values of a block whose keys reach a bound.
struct Candidates {
  uint32_t bound = 0;
  float margin = 0.1f;  // distance of the next block's bound from this block's least key that is sent
  int count = 0;
  int32_t at[TopK::kMaxBlock + 16];
};

// Returns which lanes' magnitudes are at least `least`, as bits.
GW_INLINE uint32_t reached(const F32x8& x, uint32_t least) {
  const I32x8 hits = std::bit_cast<I32x8>(magnitudes(x)) > static_cast<int32_t>(least) - 1;
#ifdef __SSE2__
  __m128 halves[2];
  memcpy(halves, &hits, sizeof hits);
  return static_cast<uint32_t>(_mm_movemask_ps(halves[0]) | _mm_movemask_ps(halves[1]) << 4);
#else
  uint32_t bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= hits[i] != 0 ? 1u << i : 0u;
  return bits;
#endif
}
#ifdef GW_WIDE
GW_INLINE uint32_t reached(const WideF32& x, uint32_t least) {
  constexpr int kNotLess = 5;
  return __builtin_ia32_ucmpd512_mask(std::bit_cast<WideI32>(magnitudes(x)),
                                      std::bit_cast<WideI32>(WideU32{} + least), kNotLess, -1);
}
#endif

// V: the vector that holds values.
template <typename V>
struct SelectingLane {
  Candidates* candidates = nullptr;  // of add_own(); optional

  // Sets s = own_scale * (own + residual_scale * s) for a block of n values, and collects the candidates by
  // the bound from the block before, in one pass.
  GW_INLINE void add_own(const float* own, float own_scale, float residual_scale, int n, float* s) const {
    Collector found{candidates->at, candidates->bound};
    for (int i = 0; i < n; i += kStep) {
      const V x = own_scale * (load<V>(own + i) + residual_scale * load<V>(s + i));
      store(s + i, x);
      found.add(x);
    }
    candidates->count = found.count;
  }

  // Compares candidates only. If there are too few or too many, the k-th largest of the maxima of 2 k groups
  // of keys or more is a bound that at least k keys reach, and seldom twice as many. If they are, the groups
  // become single keys.
  GW_INLINE void pick_largest(int n, int k, const Magnitudes& key, float* places) const {
    alignas(64) float keys[TopK::kMaxBlock + kStep];
    alignas(64) int32_t which[TopK::kMaxBlock + kStep];
    Candidates local;
    Candidates& c = candidates != nullptr ? *candidates : local;
    c.margin = c.count < k ? std::min(2 * c.margin, 0.5f) : c.count > 2 * k ? c.margin / 2 : c.margin;
    int group = 1;
    while (4 * group * std::max(k, 8) <= n) group *= 2;
    for (bool found = c.count >= k && c.count <= 4 * k; !found; group = 1) {
      for (int g = 0; g < n / group; g += kStep) {
        Words most = {};
#pragma GCC unroll 8
        for (int i = 0; i < group; ++i)
          most = larger(most, magnitudes(load<V>(key.values + g * group + i * kStep)));
        store(keys + g, floats_of(most));
      }
      c.bound = bound(keys, n / group, k, k + k / 8, 0);
      c.count = places_at_least(key.values, n, c.bound, c.at);
      found = c.count <= 4 * k || group == 1;
    }
    for (int j = 0; j < c.count; ++j) keys[j] = key.values[c.at[j]];
    store(keys + c.count, V{});
    const uint32_t least = c.count > k ? bound(keys, c.count, k, k, c.bound) : c.bound;
    int reach = places_at_least(keys, c.count, least, which);
    // Of keys equal to the k-th largest, those at higher positions are not selected.
    for (int j = reach - 1; reach > k; --j) {
      if (Magnitudes{keys}(which[j]) == least) std::copy(which + j + 1, which + reach--, which + j);
    }
    for (int j = 0; j < k; ++j) put_place(places, j, c.at[which[j]]);
    c.bound = float_bits((1 - c.margin) * bits_float(least));
  }

  GW_INLINE void put_positions(const Positions& set, const float* places, uint8_t* to) const {
    uint64_t upper[2 * TopK::kMaxBlock / 64];
    std::fill_n(upper, (set.upper_bytes() + 7) / 8, 0);
    for (int j = 0; j < set.k; ++j) {
      const int bit = (get_place(places, j) >> set.low) + j;
      upper[bit / 64] |= uint64_t{1} << bit % 64;
    }
    memcpy(to, upper, static_cast<size_t>(set.upper_bytes()));
    to += set.upper_bytes();
    int filled = 0;
    for (uint32_t j = 0, bits = 0; j < static_cast<uint32_t>(set.k); ++j) {
      bits |= (static_cast<uint32_t>(get_place(places, j)) & ((1u << set.low) - 1u)) << filled;
      for (filled += set.low; filled >= 8; filled -= 8, bits >>= 8) *to++ = static_cast<uint8_t>(bits);
      if (filled > 0) *to = static_cast<uint8_t>(bits);
    }
  }

  template <typename Take>
  GW_INLINE void each_position(const Positions& set, const uint8_t* from, const Take& take) const {
    alignas(64) int32_t places[TopK::kMaxBlock];
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
  using Words = typename Lanes<V>::U32;
  static constexpr int kStep = kLanes<V>;

  // Collects the positions of keys that are at least `least`. `places` has room for kStep more.
  struct Collector {
    int32_t* places;
    uint32_t least;
    int count = 0;
    typename Lanes<V>::I32 at = Lanes<V>::kIndex;

    GW_INLINE void add(const V& next) {
      const uint32_t hits = reached(next, least);
      if constexpr (kStep == 16) {
        store(places + count, __builtin_ia32_compresssi512_mask(at, at, static_cast<uint16_t>(hits)));
        count += std::popcount(hits);
      } else {
        for (int i = 0; hits != 0 && i < kStep; ++i) {
          places[count] = at[0] + i;
          count += static_cast<int>(hits >> i & 1u);
        }
      }
      at += kStep;
    }
  };
  GW_INLINE static int places_at_least(const float* keys, int n, uint32_t least, int32_t* places) {
    Collector found{places, least};
    for (int i = 0; i < n; i += kStep) found.add(load<V>(keys + i));
    return found.count;
  }

  // Returns a bound that `wanted` or more of n keys reach: the largest, or one that at most `enough` reach.
  // All keys reach `known`. Zeros follow the keys up to whole vectors.
  GW_INLINE static uint32_t bound(const float* keys, int n, int wanted, int enough, uint32_t known) {
    Words most = {};
    for (int i = 0; i < n; i += kStep) most = larger(most, magnitudes(load<V>(keys + i)));
    alignas(64) uint32_t lanes[kStep];
    store(lanes, most);
    const uint32_t different = *std::max_element(lanes, lanes + kStep) ^ known;
    if (different == 0) return known;
    int bit = 31 - std::countl_zero(different);
    for (uint32_t least = known >> bit >> 1 << bit << 1;; --bit) {
      const uint32_t tried = least | 1u << bit;
      int reach = 0;
      for (int i = 0; i < n; i += kStep) reach += std::popcount(reached(load<V>(keys + i), tried));
      if (reach >= wanted) least = tried;
      if (bit == 0 || (reach >= wanted && reach <= enough)) return least;
    }
  }
};

}  // namespace gradwire::host
