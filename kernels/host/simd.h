// SIMD on the host without intrinsics: loops are written plainly, the compiler vectorizes them, and each
// function marked GW_SIMD is compiled for several instruction sets, of which the dynamic linker picks the
// best at program start.
//
// How to use it:
//   - put GW_SIMD on a plain (non-template, non-inline) function that contains whole loops over arrays;
//   - everything it calls inside those loops must be inlined: mark it GW_INLINE (GW_HD arithmetic already
//   is). A lambda
//     does not inherit the instruction set, so the body of a parallel_for should only call a GW_SIMD
//     function;
//   - `#pragma omp simd` before a loop vouches that iterations are independent (so exact aliasing, in place,
//   is fine);
//     `#pragma omp simd reduction(+ : sum)` lets it sum in vector order: fixed for a given machine and
//     length;
//   - GW_ALLOW_FMA, once after the includes of a .cpp, lets a * b + c round once there. Never in code whose
//   rounding is
//     part of a contract (error feedback).
#pragma once

#include <cstdint>  // defines __GLIBC__ where there is one

// Function multiversioning needs GCC, an ELF system with ifunc (glibc) and no sanitizer: instrumented
// resolvers would run before the sanitizer's own set-up.
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
