// GW_HD marks arithmetic that is written once and compiled for both sides.
#pragma once
#if defined(__CUDACC__)
#define GW_HD __host__ __device__ __forceinline__
#else
#define GW_HD inline
#endif
