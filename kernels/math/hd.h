// GW_HD marks arithmetic that is written once and compiled for the host and the device. GW_HD_LAMBDA marks a
// lambda in such code:
//   auto square = [=](int i) GW_HD_LAMBDA { return x[i] * x[i]; };
// Functions and lambdas with these marks are inlined on the host, so that they are compiled for the caller's
// instruction set (kernels/simd/simd.h). GW_NO_UNROLL before a loop keeps nvcc from unrolling it.
#pragma once
#if defined(__CUDACC__)
#define GW_HD __host__ __device__ __forceinline__
#define GW_HD_LAMBDA
#elif defined(__GNUC__)
#define GW_HD __attribute__((always_inline)) inline
#define GW_HD_LAMBDA __attribute__((always_inline))
#else
#define GW_HD inline
#define GW_HD_LAMBDA
#endif
#ifdef __CUDA_ARCH__
#define GW_NO_UNROLL _Pragma("unroll 1")
#else
#define GW_NO_UNROLL
#endif
