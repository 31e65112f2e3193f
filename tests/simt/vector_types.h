// CUDA's vector types for the CPU shim. Names, members, sizes and alignments equal those in the toolkit's
// vector_types.h, so that a misaligned float4 access, which faults on a GPU, is an UBSan error here. Does not
// need a CUDA toolkit.
#pragma once

struct uint3;

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v);
};

#define GW_SIMT_VECTOR_TYPES(T, name, align2, align4)    \
  struct name##1 {                                       \
    T x;                                                 \
  };                                                     \
  struct alignas(align2) name##2 {                       \
    T x, y;                                              \
  };                                                     \
  struct name##3 {                                       \
    T x, y, z;                                           \
  };                                                     \
  struct alignas(align4) name##4 {                       \
    T x, y, z, w;                                        \
  };                                                     \
  constexpr name##1 make_##name##1(T x) {                \
    return {x};                                          \
  }                                                      \
  constexpr name##2 make_##name##2(T x, T y) {           \
    return {x, y};                                       \
  }                                                      \
  constexpr name##3 make_##name##3(T x, T y, T z) {      \
    return {x, y, z};                                    \
  }                                                      \
  constexpr name##4 make_##name##4(T x, T y, T z, T w) { \
    return {x, y, z, w};                                 \
  }

GW_SIMT_VECTOR_TYPES(signed char, char, 2, 4)
GW_SIMT_VECTOR_TYPES(unsigned char, uchar, 2, 4)
GW_SIMT_VECTOR_TYPES(short, short, 4, 8)
GW_SIMT_VECTOR_TYPES(unsigned short, ushort, 4, 8)
GW_SIMT_VECTOR_TYPES(int, int, 8, 16)
GW_SIMT_VECTOR_TYPES(unsigned, uint, 8, 16)
GW_SIMT_VECTOR_TYPES(long long, longlong, 16, 16)
GW_SIMT_VECTOR_TYPES(unsigned long long, ulonglong, 16, 16)
GW_SIMT_VECTOR_TYPES(float, float, 8, 16)
GW_SIMT_VECTOR_TYPES(double, double, 16, 16)
#undef GW_SIMT_VECTOR_TYPES

constexpr dim3::dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}

static_assert(sizeof(float4) == 16 && alignof(float4) == 16 && alignof(float2) == 8 && sizeof(ushort4) == 8);
