// Counter-based random bits: a value is a pure function of (seed, stream, counter), so host, GPU and all
// ranks draw the same bits, without state to keep or to checkpoint.
//
// Generator: Philox-4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11.
#pragma once

#include <cstdint>

#include "kernels/math/small_float.h"

namespace gradwire {

struct Random4 {
  uint32_t v[4];
};

GW_HD Random4 philox(uint64_t seed, uint64_t stream, uint64_t counter) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
  uint32_t c2 = static_cast<uint32_t>(stream), c3 = static_cast<uint32_t>(stream >> 32);
  for (int round = 0; round < 10; ++round) {
    uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0;
    uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The key of 16 random bits for each element, for stochastic rounding. Every element of every gradient draws
// random bits, so the generator is not Philox but a mixer of 32 bits (triple32 of C. Wellons' hash
// prospector, 2018), with a key before and within the mixer. It needs a quarter of Philox's multiplications.
// The smaller mixer, lowbias32, was visibly uneven over four million draws.
//
// A word serves two elements, eight apart, so that a vector of eight words serves sixteen neighbours. A key
// serves the 2^32 elements around `element`.
struct RoundingKey {
  uint32_t before, between;
};

GW_HD RoundingKey rounding_key(uint64_t seed, uint64_t stream, uint64_t element) {
  uint64_t x = seed ^ (stream + 1u) * 0x9e3779b97f4a7c15u ^ ((element >> 32) + 1u) * 0xd1b54a32d192ed03u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  return {static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32)};
}

// Return the number of an element's word within its key, and the element's half of the word.
GW_HD uint32_t rounding_word_of(uint64_t element) {
  return (static_cast<uint32_t>(element) >> 4) * 8u + (static_cast<uint32_t>(element) & 7u);
}
GW_HD uint32_t rounding_shift_of(uint64_t element) {
  return (static_cast<uint32_t>(element) & 8u) * 2u;
}

// Mixes the bits of a number or of a vector of numbers.
template <typename Word>
GW_HD Word rounding_word(const RoundingKey& key, Word number) {
  Word x = number ^ key.before;
  x ^= x >> 17;
  x *= 0xed5ad4bbu;
  x ^= x >> 11;
  x += key.between;
  x *= 0xac4c1b51u;
  x ^= x >> 15;
  x *= 0x31848babu;
  x ^= x >> 14;
  return x;
}

GW_HD uint32_t random16(uint64_t seed, uint64_t stream, uint64_t element) {
  const uint32_t word = rounding_word(rounding_key(seed, stream, element), rounding_word_of(element));
  return (word >> rounding_shift_of(element)) & 0xffffu;
}

// Computes random16() for elements near a given element, with a key that is computed once.
struct RoundingBits {
  uint64_t seed, stream, near;
  RoundingKey key;
  GW_HD RoundingBits(uint64_t its_seed, uint64_t its_stream, uint64_t element)
      : seed(its_seed), stream(its_stream), near(element >> 32), key(rounding_key(seed, stream, element)) {}

  GW_HD RoundingKey key_of(uint64_t element) const {
    return element >> 32 == near ? key : rounding_key(seed, stream, element);
  }
  GW_HD uint32_t word(uint64_t element) const {
    return rounding_word(key_of(element), rounding_word_of(element));
  }
  GW_HD uint32_t operator()(uint64_t element) const {
    return (word(element) >> rounding_shift_of(element)) & 0xffffu;
  }
};

// Returns a uniform number in the open interval (0, 1).
GW_HD float uniform01(uint32_t bits) {
  return (static_cast<float>(bits >> 9) + 0.5f) * (1.0f / 8388608.0f);
}

// Returns a roughly normal number with mean 0 and variance 1, good enough for a random direction: the scaled
// sum of four uniform numbers.
GW_HD float rough_normal(const Random4& r) {
  float sum = uniform01(r.v[0]) + uniform01(r.v[1]) + uniform01(r.v[2]) + uniform01(r.v[3]) - 2.0f;
  return sum * 1.7320508f;
}

// The coordinates that random-k chooses: one element in each of k strata, drawn from the counter-based
// generator.
//
// A tensor of n elements is turned by a random rotation, as a ring, and cut into k strata of floor(n / k) or
// ceil(n / k) consecutive elements; one element of each is chosen uniformly. Exactly k distinct elements are
// chosen, in O(k) and without communication. With the rotation each element is chosen with probability k / n
// in each step, independent of its position. Without the rotation, the elements of the shorter strata would
// be chosen more often in every step.

// The division of count elements into k strata; 1 <= k <= count, and strata have fewer than 2^32 elements.
struct Strata {
  int64_t count, k;

  GW_HD int64_t size(int64_t stratum) const { return count / k + (stratum < count % k ? 1 : 0); }
  GW_HD int64_t begin(int64_t stratum) const {
    const int64_t longer = count % k;  // the first `longer` strata have one element more
    return stratum * (count / k) + (stratum < longer ? stratum : longer);
  }
  GW_HD int64_t of(int64_t position) const {
    const int64_t size = count / k, longer = count % k, in_longer = longer * (size + 1);
    return position < in_longer ? position / (size + 1) : longer + (position - in_longer) / size;
  }
};

// The draws for one tensor in one step, the same on every rank.
struct RandKDraw {
  uint64_t seed, step;
  int32_t tensor;

  // Returns draw number `number` of the tensor; there are at most 2^40 strata.
  GW_HD Random4 draw(uint64_t number) const {
    return philox(seed, step, (static_cast<uint64_t>(static_cast<uint32_t>(tensor)) << 40) + number);
  }
  // Returns the rotation of the tensor, in [0, count).
  GW_HD int64_t rotation(int64_t count) const {
    const Random4 r = draw((uint64_t{1} << 40) - 1);
    const uint64_t bits = static_cast<uint64_t>(r.v[0]) << 32 | r.v[1];
    return static_cast<int64_t>(bits % static_cast<uint64_t>(count));
  }
  // Returns the index of the element chosen from a stratum.
  GW_HD int64_t chosen(const Strata& strata, int64_t stratum, int64_t rotation) const {
    const uint64_t size = static_cast<uint64_t>(strata.size(stratum));
    const uint64_t pick = draw(static_cast<uint64_t>(stratum)).v[0] * size >> 32;
    const int64_t at = strata.begin(stratum) + static_cast<int64_t>(pick) + rotation;
    return at < strata.count ? at : at - strata.count;
  }
  // Returns the stratum of an element.
  GW_HD int64_t stratum_of(const Strata& strata, int64_t element, int64_t rotation) const {
    return strata.of(element < rotation ? element - rotation + strata.count : element - rotation);
  }
};

}  // namespace gradwire
