// SIMD on the host without intrinsics: plain loops that the compiler vectorizes. Each function marked GW_SIMD
// is compiled for several instruction sets, and the dynamic linker picks the best at program start.
//
// Use:
//   - put GW_SIMD on a plain (non-template, non-inline) function that contains whole loops over arrays;
//   - all functions called inside those loops must be inlined: mark them GW_INLINE (GW_HD arithmetic is).
//     A lambda does not inherit the instruction set, so the body of a parallel_for should only call a GW_SIMD
//     function;
//   - `#pragma omp simd` before a loop asserts that iterations are independent (exact aliases are fine);
//     `#pragma omp simd reduction(+ : sum)` allows sums in vector order, which is fixed for a given machine
//     and length;
//   - GW_ALLOW_FMA, once after the includes of a .cpp, lets a * b + c round once there. Never in code whose
//     rounding is part of a contract (error feedback).
// Loops that the compiler does not vectorize well use kernels/simd/vector.h.
#pragma once

#include <cstdint>  // defines __GLIBC__ on glibc
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

// Function multiversioning needs GCC, an ELF system with ifunc (glibc) and no sanitizer: instrumented
// resolvers would run before the sanitizer's set-up.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && !defined(GRADWIRE_SANITIZED) && \
    __GNUC__ >= 12
#define GW_SIMD __attribute__((noinline, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define GW_SIMD
#endif

#define GW_INLINE __attribute__((always_inline)) inline

#if defined(__clang__)
#define GW_ALLOW_FMA _Pragma("STDC FP_CONTRACT ON")
#else
#define GW_ALLOW_FMA _Pragma("GCC optimize(\"fp-contract=fast\")")
#endif

namespace gradwire::host {

// Results of at least this many bytes would only evict other data from the caches. They are written past the
// caches, which also saves reading each line first.
inline constexpr int64_t kStreamBytes = 16 * 1024 * 1024;

GW_INLINE bool streams(const void* to, int64_t bytes) {
  return bytes >= kStreamBytes && reinterpret_cast<uintptr_t>(to) % 16 == 0;
}
// Stores a GCC vector without filling the caches. `to` is 16-byte aligned.
template <typename V>
GW_INLINE void stream_store(void* to, const V& v) {
#ifdef __SSE2__
  __m128i part[sizeof(V) / 16];
  std::memcpy(part, &v, sizeof v);
  for (size_t i = 0; i < sizeof(V) / 16; ++i) _mm_stream_si128(static_cast<__m128i*>(to) + i, part[i]);
#else
  std::memcpy(to, &v, sizeof v);
#endif
}
// Makes the results of stream_store() visible to other threads; required before another thread reads them.
GW_INLINE void stream_fence() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace gradwire::host
