// Eight floats as one value, for loops so short that the compiler would unroll them instead of vectorizing.
// Compiled to what the function's instruction set has (kernels/simd/simd.h): one AVX register, or two of SSE.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/math/exp.h"
#include "kernels/simd/simd.h"

namespace gradwire {

using Float8 = float __attribute__((vector_size(32)));
using Int8 = int32_t __attribute__((vector_size(32)));
using Word8 = uint32_t __attribute__((vector_size(32)));

template <>
struct FloatWords<Float8> {
  static GW_INLINE Word8 words(Float8 x) { return reinterpret_cast<Word8>(x); }
  static GW_INLINE Float8 floats(Word8 u) { return reinterpret_cast<Float8>(u); }
};

namespace host {

// No alignment needed.
GW_INLINE Float8 load8(const float* from) {
  Float8 v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
GW_INLINE void store8(float* to, Float8 v) {
  std::memcpy(to, &v, sizeof v);
}

GW_INLINE Float8 load8(const Bf16* from) {
  uint16_t __attribute__((vector_size(16))) v;
  std::memcpy(&v, from, sizeof v);
  return reinterpret_cast<Float8>(__builtin_convertvector(v, Word8) << 16);
}
// Rounded as narrow<Bf16> does.
GW_INLINE void store8(Bf16* to, Float8 v) {
  typedef uint16_t Half8 __attribute__((vector_size(16)));
  const Word8 x = reinterpret_cast<Word8>(v);
  const Word8 rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16, nan = (x >> 16) | 0x0040u;
  const Half8 bits = __builtin_convertvector((x & 0x7fffffffu) > 0x7f800000u ? nan : rounded, Half8);
  std::memcpy(to, &bits, sizeof bits);
}

// Lanes i with first + i < width.
GW_INLINE Int8 lanes_below(int first, int width) {
  return Int8{0, 1, 2, 3, 4, 5, 6, 7} < width - first;
}

GW_INLINE Float8 larger(Float8 a, Float8 b) {
  return a > b ? a : b;
}

// Over the lanes, by halving: the order does not depend on the instruction set.
GW_INLINE float sum_of(Float8 v) {
  v += __builtin_shuffle(v, Int8{4, 5, 6, 7, 0, 1, 2, 3});
  v += __builtin_shuffle(v, Int8{2, 3, 0, 1, 6, 7, 4, 5});
  return v[0] + v[1];
}
GW_INLINE float largest_of(Float8 v) {
  v = larger(v, __builtin_shuffle(v, Int8{4, 5, 6, 7, 0, 1, 2, 3}));
  v = larger(v, __builtin_shuffle(v, Int8{2, 3, 0, 1, 6, 7, 4, 5}));
  return v[0] > v[1] ? v[0] : v[1];
}

// Element j of v[i] and element i of v[j] change places.
GW_INLINE void transpose(Float8 (&v)[8]) {
  Float8 pairs[8], fours[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = __builtin_shuffle(v[i], v[i + 1], Int8{0, 8, 1, 9, 4, 12, 5, 13});
    pairs[i + 1] = __builtin_shuffle(v[i], v[i + 1], Int8{2, 10, 3, 11, 6, 14, 7, 15});
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const int from = i / 2 * 4 + i % 2;
    fours[2 * i] = __builtin_shuffle(pairs[from], pairs[from + 2], Int8{0, 1, 8, 9, 4, 5, 12, 13});
    fours[2 * i + 1] = __builtin_shuffle(pairs[from], pairs[from + 2], Int8{2, 3, 10, 11, 6, 7, 14, 15});
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    v[i] = __builtin_shuffle(fours[i], fours[i + 4], Int8{0, 1, 2, 3, 8, 9, 10, 11});
    v[i + 4] = __builtin_shuffle(fours[i], fours[i + 4], Int8{4, 5, 6, 7, 12, 13, 14, 15});
  }
}

}  // namespace host
}  // namespace gradwire
