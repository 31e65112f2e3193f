// What the host sides of the wire formats share: parts of a call, random bits.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels/math/random.h"
#include "kernels/simd/vector.h"
#include "kernels/wire/format.h"

namespace gradwire::host {

inline constexpr int kWidth = kLanes<F32x8>;

template <typename T>
void advance(T*& p, int64_t n) {
  if (p != nullptr) p += n;
}

// random16() of `count` elements from `first` on, at the returned place in `buffer`, which holds
// random_buffer(count): sixteen counters of the generator at a time, whose rounds run side by side.
inline constexpr int kCounters = 16, kRandomRun = 8 * kCounters;  // and the elements that they serve
constexpr int random_buffer(int count) {
  return (count + kRandomRun - 1) / kRandomRun * kRandomRun + kRandomRun;
}
GW_INLINE const uint16_t* random_bits(uint64_t seed, uint64_t step, uint64_t first, int count,
                                      uint16_t* buffer) {
  const int shift = static_cast<int>(first & 7);  // a counter serves eight elements
  for (int run = 0; run < shift + count; run += kRandomRun) {
    const uint64_t counter = (first + static_cast<uint64_t>(run)) >> 3;
    uint32_t words[4 * kCounters];
#pragma omp simd
    for (int k = 0; k < kCounters; ++k) {
      Random4 draw = philox(seed, step, counter + static_cast<uint64_t>(k));
      for (int w = 0; w < 4; ++w) words[4 * k + w] = draw.v[w];
    }
    for (int i = 0; i < kRandomRun; ++i) {
      buffer[run + i] = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
    }
  }
  return buffer + shift;
}

GW_INLINE uint64_t step_of(const WireRounding& rounding) {
  return rounding.step != nullptr ? *rounding.step : 0;
}

}  // namespace gradwire::host
