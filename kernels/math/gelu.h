// The normal distribution's Phi and phi, and GELU from them, exact or in its tanh form, branch-free in float.
//
// For a = |x|: Phi(-a) = exp(-a^2 / 2) S(a), where S is smooth: (a + 3.5) S(a) is a degree-9 polynomial in u
// = (a - 3.5) / (a + 3.5) to 5e-9 relative. One exponential serves both Phi and phi. Computing the small tail
// first keeps its relative accuracy, whereas 0.5 * (1 + erf(x / sqrt 2)) would lose digits by cancellation.
// Measured over [-13, 13]: relative error of Phi and of GELU below 4e-7 everywhere, of phi below 2e-7.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/math/small_float.h"

namespace gradwire {

// exp in float, branch-free, so that loops over it vectorize; written once for host and device.
//
// exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln 2 / 2; exp(r) by a degree-6 polynomial fitted for least
// relative error on [-0.39, 0.39] (4e-9, below float's rounding). Error measured over [-87, 88]: under 1.4
// units in the last place.

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

// The form of GELU: x Phi(x) by erf, or by the tanh approximation: PyTorch's approximate='none' and 'tanh'.
enum class Gelu : uint8_t { exact, tanh };

struct Normal {
  float cdf;      // Phi(x)
  float density;  // phi(x)
};

// Returns 1 / x for x far from float's limits. On a GPU, refines the hardware's estimate by one step of
// Newton's method: exact to a unit in the last place, like the division, but without a subroutine call.
GW_HD float reciprocal(float x) {
#ifdef __CUDA_ARCH__
  const float estimate = __fdividef(1.0f, x);
  return fmaf(estimate, fmaf(-x, estimate, 1.0f), estimate);
#else
  return 1.0f / x;
#endif
}

GW_HD Normal normal_at(float x) {
  float a = x < 0.0f ? -x : x;
  a = a < 14.0f ? a : 14.0f;  // exp(-a^2/2) is 0 from 13.2 on; also excludes infinities and NaN
  // a^2 in two parts: the top 12 bits of a squared are exact.
  float top = bits_float(float_bits(a) & 0xfffff000u);
  float e = exp_sum(-0.5f * top * top, -0.5f * (a - top) * (a + top));
  float q = reciprocal(a + 3.5f);
  float u = (a - 3.5f) * q;
  float s = 0.000115899417f;
  s = s * u + 0.00043166931f;
  s = s * u - 0.00049380222f;
  s = s * u - 0.00318149577f;
  s = s * u + 0.00649116213f;
  s = s * u + 0.0174076445f;
  s = s * u - 0.116052655f;
  s = s * u + 0.315424959f;
  s = s * u - 0.565561761f;
  s = s * u + 0.744416075f;
  float tail = e * (s * q);
  return {x < 0.0f ? tail : 1.0f - tail, 0.398942280f * e};
}

// Return 2^x for x <= 0 and 1 / x by the hardware's estimates, exact to 2 units in the last place.
GW_HD float exp2_estimate(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return x < -126.0f ? 0.0f : std::exp2(x);
#endif
}
GW_HD float reciprocal_estimate(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

// Returns the same as normal_at(), for results that are rounded to BF16 (2^-8): the relative error of
// Phi(-|x|) and phi is up to 1e-5, with a third of the instructions. The polynomial has degree 7 and an error
// of 4e-7.
GW_HD Normal coarse_normal_at(float x) {
  float a = x < 0.0f ? -x : x;
  a = a < 14.0f ? a : 14.0f;
  const float e = exp2_estimate(-0.721347520f * (a * a));
  const float q = reciprocal_estimate(a + 3.5f);
  const float u = (a - 3.5f) * q;
  float s = -0.000788843550f;
  s = s * u - 0.00292058242f;
  s = s * u + 0.00673327455f;
  s = s * u + 0.0173557363f;
  s = s * u - 0.116104141f;
  s = s * u + 0.315429449f;
  s = s * u - 0.565559089f;
  s = s * u + 0.744415998f;
  const float tail = e * (s * q);
  return {x < 0.0f ? tail : 1.0f - tail, 0.398942280f * e};
}

// Returns the tanh form: Phi is (1 + tanh(v / 2)) / 2 = 1 / (1 + exp(-v)) with v = 2 sqrt(2 / pi) (x +
// 0.044715 x^3), so that GELU differs from the exact form by up to 5e-4; the density is its derivative.
// Phi(-|x|) is exact to (2 + v) 1e-7 relative. kCoarse: with a relative error of 1e-5, for results that are
// rounded to BF16.
template <bool kCoarse = false>
GW_HD Normal tanh_normal_at(float x) {
  float a = x < 0.0f ? -x : x;
  a = a < 11.0f ? a : 11.0f;  // exp(-v) is 0 from 10 on; also excludes infinities and NaN
  const float square = a * a, v = a * (square * 0.0713548163f + 1.59576912f);
  const float e = kCoarse ? exp2_estimate(-1.44269504f * v) : exp_float(-v);
  const float q = kCoarse ? reciprocal_estimate(1.0f + e) : reciprocal(1.0f + e);
  const float tail = e * q;
  return {x < 0.0f ? tail : 1.0f - tail, tail * q * (square * 0.214064449f + 1.59576912f)};
}

template <Gelu kForm, bool kCoarse = false>
GW_HD Normal normal_in_form(float x) {
  if constexpr (kForm == Gelu::tanh) return tanh_normal_at<kCoarse>(x);
  return kCoarse ? coarse_normal_at(x) : normal_at(x);
}

GW_HD float gelu_of(float x, const Normal& n) {
  return x * n.cdf;
}
// Returns d gelu / dx = Phi(x) + x phi(x).
GW_HD float gelu_derivative_of(float x, const Normal& n) {
  return n.cdf + x * n.density;
}

}  // namespace gradwire
