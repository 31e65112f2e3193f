// Random values for tests. The values are the same on every machine.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace gradwire::testing {

// Returns `count` normal draws with standard deviation `scale`.
inline std::vector<float> normal(int64_t count, uint32_t seed, float scale = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution(0.0f, scale);
  std::vector<float> values(count);
  for (float& v : values) v = distribution(generator);
  return values;
}

}  // namespace gradwire::testing
