#include "kernels/simd/vector.h"

#ifdef GW_SIMD_CHOOSES
#include <immintrin.h>
#endif

namespace gradwire::host {
namespace {

#ifdef GW_SIMD_CHOOSES
__attribute__((target("avx512f,avx512bw,avx512vbmi2,popcnt"))) int places_by_compression(const int16_t* keys,
                                                                                         int n, int16_t least,
                                                                                         uint16_t* places) {
  alignas(64) uint16_t first[32];
  for (int i = 0; i < 32; ++i) first[i] = static_cast<uint16_t>(i);
  __m512i at = _mm512_load_si512(first);
  const __m512i step = _mm512_set1_epi16(32), limit = _mm512_set1_epi16(least);
  int all = 0;
  for (int i = 0; i < n; i += 32, at = _mm512_add_epi16(at, step)) {
    const __mmask32 hits = _mm512_cmpge_epi16_mask(_mm512_loadu_si512(keys + i), limit);
    _mm512_storeu_si512(places + all, _mm512_maskz_compress_epi16(hits, at));
    all += _mm_popcnt_u32(hits);
  }
  return all;
}
#endif

GW_SIMD void compare_all(const int16_t* keys, int n, int16_t least, uint8_t* hits) {
#pragma omp simd
  for (int i = 0; i < n; ++i) hits[i] = keys[i] >= least ? 1 : 0;
}

}  // namespace

int places_at_least(const int16_t* keys, int n, int16_t least, uint16_t* places) {
#ifdef GW_SIMD_CHOOSES
  static const bool compresses = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vbmi2");
  if (compresses) return places_by_compression(keys, n, least, places);
#endif
  int all = 0;
  for (int begin = 0; begin < n; begin += 32) {
    alignas(32) uint8_t hits[32];
    compare_all(keys + begin, 32, least, hits);
    for (int part = 0; part < 32; part += 8) {
      uint64_t eight;
      std::memcpy(&eight, hits + part, sizeof eight);
      for (; eight != 0; eight &= eight - 1)
        places[all++] = static_cast<uint16_t>(begin + part + std::countr_zero(eight) / 8);
    }
  }
  return all;
}

GW_SIMD void widen_all(const Bf16* from, int64_t count, float* to) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]);
}

GW_SIMD void narrow_all(const float* from, const Bf16* bias, int64_t count, Bf16* to) {
  if (bias != nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = narrow<Bf16>(from[i] + widen(bias[i]));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = narrow<Bf16>(from[i]);
  }
}

GW_SIMD void add_all(const float* x, int64_t count, float* to) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] += x[i];
}

namespace {

template <typename T>
GW_SIMD void combine_rows(const T* partial, int64_t count, int64_t stride, int64_t width, bool accumulate,
                          float* sum) {
  constexpr int64_t kTile = 256;
  for (int64_t begin = 0; begin < width; begin += kTile) {
    int64_t n = std::min(kTile, width - begin);
    float total[kTile] = {};
    for (int64_t i = 0; i < count; ++i) {
      const T* row = partial + i * stride + begin;
#pragma omp simd
      for (int64_t c = 0; c < n; ++c) total[c] += widen(row[c]);
    }
    for (int64_t c = 0; c < n; ++c) sum[begin + c] = accumulate ? sum[begin + c] + total[c] : total[c];
  }
}

}  // namespace

void combine_partial_sums(const PartialSums& of) {
  for (size_t i = 0; i < of.sums.size(); ++i) {
    if (of.sums[i] == nullptr) continue;
    const int64_t first = static_cast<int64_t>(i) * of.width;
    if (of.partial_bf16 != nullptr)
      combine_rows(of.partial_bf16 + first, of.count, of.pitch, of.width, of.accumulate, of.sums[i]);
    else
      combine_rows(of.partial + first, of.count, of.pitch, of.width, of.accumulate, of.sums[i]);
  }
}

}  // namespace gradwire::host

namespace gradwire {

std::string simd_level() {
#if defined(GRADWIRE_SANITIZED)
  return "default (sanitized build: no run-time dispatch)";
#elif defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512cd")) {
    return "x86-64-v4 (AVX-512)";
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
    return "x86-64-v3 (AVX2, FMA)";
  }
  return "x86-64 (SSE2)";
#else
  return "the compiler's default for this architecture";
#endif
}

}  // namespace gradwire
