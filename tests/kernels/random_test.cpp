// The random bits of stochastic rounding. The bits are uniform and independent of the bits of neighbouring
// elements, the next step and other ranks.
#include "kernels/math/random.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

namespace gradwire {
namespace {

constexpr uint64_t kElements = 1 << 20;
// the elements cross the boundary between two keys
constexpr uint64_t kFar = (uint64_t{1} << 32) - kElements / 2;

// Returns the deviation of `counts` from equal counts, in standard deviations of random counts.
double deviations(const std::vector<int64_t>& counts) {
  double all = 0, chi_squared = 0;
  for (int64_t n : counts) all += static_cast<double>(n);
  const double expected = all / static_cast<double>(counts.size());
  for (int64_t n : counts) chi_squared += std::pow(static_cast<double>(n) - expected, 2) / expected;
  const double freedom = static_cast<double>(counts.size()) - 1;
  return std::abs(chi_squared - freedom) / std::sqrt(2 * freedom);
}

TEST(RoundingBits, AreUniformInTheirUpperAndLowerBits) {
  for (uint64_t first : {uint64_t{0}, kFar}) {
    for (uint64_t seed : {0u, 1u, 77u}) {
      std::vector<int64_t> upper(256), lower(256);
      for (uint64_t i = first; i < first + kElements; ++i) {
        const uint32_t bits = random16(seed, 5, i);
        ASSERT_LT(bits, 65536u);
        ++upper[bits >> 8], ++lower[bits & 255];
      }
      EXPECT_LT(deviations(upper), 5) << seed;
      EXPECT_LT(deviations(lower), 5) << seed;
    }
  }
}

TEST(RoundingBits, AreIndependentOfNeighboursStepsAndSeeds) {
  struct Other {
    const char* name;
    std::function<uint32_t(uint64_t)> bits;
  };
  for (const Other& other :
       {Other{"the next element", [](uint64_t i) { return random16(3, 9, i + 1); }},
        Other{"the other half of its word", [](uint64_t i) { return random16(3, 9, i ^ 8); }},
        Other{"sixteen on", [](uint64_t i) { return random16(3, 9, i + 16); }},
        Other{"a row on", [](uint64_t i) { return random16(3, 9, i + 768); }},
        Other{"the next step", [](uint64_t i) { return random16(3, 10, i); }},
        Other{"a step on, an element on", [](uint64_t i) { return random16(3, 10, i + 1); }},
        Other{"the next rank's seed", [](uint64_t i) { return random16(4, 9, i); }},
        Other{"the next key", [](uint64_t i) { return random16(3, 9, i + (uint64_t{1} << 32)); }}}) {
    // Joint counts of the four highest bits of each word, which decide most roundings, and of the four lowest
    // bits.
    std::vector<int64_t> upper(256), lower(256);
    double product = 0;
    for (uint64_t i = 0; i < kElements; ++i) {
      const uint32_t mine = random16(3, 9, i), its = other.bits(i);
      ++upper[(mine >> 12) * 16 + (its >> 12)], ++lower[(mine & 15) * 16 + (its & 15)];
      product += (mine - 32767.5) * (its - 32767.5) / (65536.0 * 65536.0 / 12);
    }
    EXPECT_LT(deviations(upper), 5) << other.name;
    EXPECT_LT(deviations(lower), 5) << other.name;
    EXPECT_LT(std::abs(product) / std::sqrt(double{kElements}), 5) << other.name;
  }
}

TEST(RoundingBits, EqualTheDrawOfEachElement) {
  for (uint64_t first : {uint64_t{5}, (uint64_t{1} << 32) - 20}) {
    const RoundingBits bits(8, 2, first);
    for (uint64_t i = first; i < first + 40; ++i) EXPECT_EQ(bits(i), random16(8, 2, i));
  }
}

}  // namespace
}  // namespace gradwire
