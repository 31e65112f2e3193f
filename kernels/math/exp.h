// exp in float, branch-free, so that loops over it vectorize; written once for host and device.
//
// exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln 2 / 2; exp(r) by a degree-6 polynomial fitted for least
// relative error on [-0.39, 0.39] (4e-9, below float's rounding). Error measured over [-87, 88]: under 1.4
// units in the last place.
#pragma once

#include <cstdint>

#include "kernels/math/bf16.h"
#include "kernels/math/hd.h"

namespace gradwire {

inline constexpr float kExpLowest = -87.33654f;  // ln(2^-126): results below are flushed to 0
inline constexpr float kExpHighest = 88.02969f;  // ln(2^127): larger arguments are treated as kExpHighest

// The operations on a type that the arithmetic below needs; kernels/simd/vector.h adds the operations on
// eight floats.
template <typename F>
struct FloatWords;
template <>
struct FloatWords<float> {
  static GW_HD uint32_t words(float x) { return float_bits(x); }
  static GW_HD float floats(uint32_t u) { return bits_float(u); }
};

// Returns exp(high + low) for |low| <= 0.04; meant for exp(-x*x/2), where rounding x*x would cost digits. A
// NaN in `high` stays a NaN; -inf gives 0.
template <typename F>
GW_HD F exp_sum(F high, F low) {
  const F lowest = F{} + kExpLowest, highest = F{} + kExpHighest;
  F x = high < lowest ? lowest : high;
  x = x > highest ? highest : x;
  // Adding 1.5 * 2^23 leaves round(x / ln 2) in the low bits.
  F shifted = x * 1.44269504f + 12582912.0f;
  F n = shifted - 12582912.0f;
  // ln 2 in two parts; n times the first is exact.
  F r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  r = r + low;
  F p = r * 0.00138230167f + 0.00838578759f;
  p = p * r + 0.0416691636f;
  p = p * r + 0.166662731f;
  p = p * r + 0.49999984f;
  p = p * r + 1.00000007f;
  p = p * r + 1.0f;
  F power = FloatWords<F>::floats((FloatWords<F>::words(shifted) << 23) + 0x3f800000u);
  F result = p * power;
  return high < lowest ? F{} : result;
}

// Returns exp(x) for x up to 88; meant for softmax, where x <= 0.
template <typename F>
GW_HD F exp_float(F x) {
  return exp_sum(x, F{});
}

}  // namespace gradwire
