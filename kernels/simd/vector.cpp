#include "kernels/simd/vector.h"

namespace gradwire::host {

bool runs_wide() {
#ifdef GW_SIMD_CHOOSES
  static const bool runs = __builtin_cpu_supports("x86-64-v4");
  return runs;
#else
  return false;
#endif
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
