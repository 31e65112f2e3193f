// The coordinates that random-k chooses: one element in each of k strata, drawn from the counter-based
// generator.
//
// A tensor of n elements is turned by a random rotation, as a ring, and cut into k strata of floor(n / k) or
// ceil(n / k) consecutive elements; one element of each is chosen uniformly. Exactly k distinct elements are
// chosen, in O(k) and without communication. With the rotation each element is chosen with probability k / n
// in each step, independent of its position. Without the rotation, the elements of the shorter strata would
// be chosen more often in every step.
#pragma once

#include <cstdint>

#include "kernels/math/random.h"

namespace gradwire {

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
