// Helpers for the host's ops of the wire formats: parts of a call, random bits.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels/math/small_float.h"
#include "kernels/math/random.h"
#include "kernels/simd/vector.h"
#include "kernels/wire/format.h"

namespace gradwire::host {

inline constexpr int kWidth = kLanes<F32x8>;

template <typename T>
void advance(T*& p, int64_t n) {
  if (p != nullptr) p += n;
}

// Draws random16() for `count` elements starting at `first`, sixteen at a time. Returns the address of the
// bits in `buffer`, which has room for random_buffer(count) elements.
inline constexpr int kDraw = 16;
constexpr int random_buffer(int count) {
  return (count + kDraw - 1) / kDraw * kDraw + kDraw;
}
GW_INLINE const uint16_t* random_bits(uint64_t seed, uint64_t step, uint64_t first, int count,
                                      uint16_t* buffer) {
  static_assert(2 * kWidth == kDraw);
  const int shift = static_cast<int>(first % kDraw);
  RoundingKey key = rounding_key(seed, step, first);
  for (int i = 0; i < shift + count; i += kDraw) {
    const uint64_t element = first - static_cast<uint64_t>(shift) + static_cast<uint64_t>(i);
    if (static_cast<uint32_t>(element) == 0) key = rounding_key(seed, step, element);
    const U32x8 numbers = U32x8{0, 1, 2, 3, 4, 5, 6, 7} + rounding_word_of(element);
    const U32x8 words = rounding_word(key, numbers);
    store(buffer + i, to_u16(words & 0xffffu));
    store(buffer + i + kWidth, to_u16(words >> 16));
  }
  return buffer + shift;
}

// Sets `kept`, which may be null, to 0 where x is not finite.
GW_INLINE void forget_not_finite(const float* x, float* kept, int64_t count) {
  if (kept == nullptr) return;
  uint32_t any = 0;
#pragma omp simd reduction(| : any)
  for (int64_t i = 0; i < count; ++i) any |= is_finite(x[i]) ? 0u : 1u;
  if (any == 0) return;
  for (int64_t i = 0; i < count; ++i) {
    if (!is_finite(x[i])) kept[i] = 0.0f;
  }
}

GW_INLINE uint64_t step_of(const WireRounding& rounding) {
  return rounding.step != nullptr ? *rounding.step : 0;
}

}  // namespace gradwire::host
