// Device functions that involve only the calling thread: loads and stores with cache hints, bit operations,
// arithmetic with rounding modes. Fast approximations (__expf) compute the accurate value, so tests must also
// allow for the GPU's error.
#pragma once

#include <math.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define GW_SIMT_LOAD(name)    \
  template <typename T>       \
  inline T name(const T* p) { \
    return *p;                \
  }
GW_SIMT_LOAD(__ldg)
GW_SIMT_LOAD(__ldca)
GW_SIMT_LOAD(__ldcg)
GW_SIMT_LOAD(__ldcs)
GW_SIMT_LOAD(__ldcv)
GW_SIMT_LOAD(__ldlu)
#undef GW_SIMT_LOAD

#define GW_SIMT_STORE(name)                               \
  template <typename T>                                   \
  inline void name(T* p, std::type_identity_t<T> value) { \
    *p = value;                                           \
  }
GW_SIMT_STORE(__stwb)
GW_SIMT_STORE(__stcg)
GW_SIMT_STORE(__stcs)
GW_SIMT_STORE(__stwt)
#undef GW_SIMT_STORE

inline unsigned __float_as_uint(float x) {
  return std::bit_cast<unsigned>(x);
}
inline int __float_as_int(float x) {
  return std::bit_cast<int>(x);
}
inline float __uint_as_float(unsigned x) {
  return std::bit_cast<float>(x);
}
inline float __int_as_float(int x) {
  return std::bit_cast<float>(x);
}
inline long long __double_as_longlong(double x) {
  return std::bit_cast<long long>(x);
}
inline double __longlong_as_double(long long x) {
  return std::bit_cast<double>(x);
}

inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline int __popcll(unsigned long long x) {
  return std::popcount(x);
}
inline int __clz(int x) {
  return std::countl_zero(static_cast<unsigned>(x));
}
inline int __clzll(long long x) {
  return std::countl_zero(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __ffsll(long long x) {
  return __builtin_ffsll(x);
}
inline unsigned __brev(unsigned x) {
  unsigned out = 0;
  for (int i = 0; i < 32; ++i) out |= (x >> i & 1u) << (31 - i);
  return out;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(uint64_t{a} * b >> 32);
}
inline int __mulhi(int a, int b) {
  return static_cast<int>(int64_t{a} * b >> 32);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((uint64_t{high} << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
// Returns four selected bytes: byte i of the result is byte (selector >> 4i) & 7 of the eight bytes {a, b}.
// Does not support selectors with bit 3 set, which replicate a sign.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  uint64_t bytes = uint64_t{b} << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i)
    out |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7u) & 0xffu) << 8 * i;
  return out;
}

inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fsub_rn(float a, float b) {
  return a - b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __fmaf_rn(float a, float b, float c) {
  return fmaf(a, b, c);
}
inline float __fsqrt_rn(float x) {
  return sqrtf(x);
}
inline float __frcp_rn(float x) {
  return 1.0f / x;
}
inline float __frsqrt_rn(float x) {
  return static_cast<float>(1.0 / sqrt(static_cast<double>(x)));
}
inline double __dadd_rn(double a, double b) {
  return a + b;
}
inline double __dmul_rn(double a, double b) {
  return a * b;
}
inline double __fma_rn(double a, double b, double c) {
  return fma(a, b, c);
}
inline double __dsqrt_rn(double x) {
  return sqrt(x);
}
inline float rsqrtf(float x) {
  return __frsqrt_rn(x);
}
inline double rsqrt(double x) {
  return 1.0 / sqrt(x);
}
inline float __expf(float x) {
  return expf(x);
}
inline float __logf(float x) {
  return logf(x);
}
inline float __powf(float x, float y) {
  return powf(x, y);
}
inline float __sinf(float x) {
  return sinf(x);
}
inline float __cosf(float x) {
  return cosf(x);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __saturatef(float x) {
  return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;
}
inline int __float2int_rn(float x) {
  return static_cast<int>(lrintf(x));
}
inline int __float2int_rz(float x) {
  return static_cast<int>(x);
}
inline float __int2float_rn(int x) {
  return static_cast<float>(x);
}
inline float __double2float_rn(double x) {
  return static_cast<float>(x);
}

// Return the minimum or maximum. As in CUDA, the types may be mixed integers, and NaN is ignored if the other
// operand is a number.
template <typename A, typename B>
requires std::is_arithmetic_v<A> && std::is_arithmetic_v<B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  T x = static_cast<T>(a), y = static_cast<T>(b);
  if constexpr (std::is_floating_point_v<T>) return x != x ? y : y < x ? y : x;
  return y < x ? y : x;
}
template <typename A, typename B>
requires std::is_arithmetic_v<A> && std::is_arithmetic_v<B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  T x = static_cast<T>(a), y = static_cast<T>(b);
  if constexpr (std::is_floating_point_v<T>) return x != x ? y : x < y ? y : x;
  return x < y ? y : x;
}
