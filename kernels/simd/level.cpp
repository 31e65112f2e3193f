#include "kernels/simd/level.h"

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
