// GW_HD marks arithmetic that is written once and compiled for both sides.
#pragma once
#if defined(__CUDACC__)
#define GW_HD __host__ __device__ __forceinline__
#elif defined(__GNUC__)
// always_inline: takes on its caller's instruction set (kernels/simd/simd.h).
#define GW_HD __attribute__((always_inline)) inline
#else
#define GW_HD inline
#endif
