// Element-wise kernels over arrays of any alignment: a body of 16-byte accesses with a scalar head and tail,
// in one launch. When no head aligns all arrays at once, every element is handled as a scalar.
#pragma once

#include <cstdint>
#include <type_traits>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#endif

#include "kernels/math/bf16.h"
#include "runtime/device/launch.cuh"

namespace gradwire::cuda {

// Elements [0, head) and [head + vectors * width, count) are scalar, the rest are vectors of `width`.
struct VectorSplit {
  int64_t count = 0, head = 0, vectors = 0;
};

// A vector of eight is two runs of four elements, kApart elements apart. A warp has 256 elements, and each of
// its accesses covers 128 adjacent elements. With eight floats in a row, each store would fill half of every
// 32-byte sector.
inline constexpr int kApart = 128;

// Return element k of a vector of W that begins at 0, and the first element of vector v.
template <int W>
__device__ __forceinline__ int element_of(int k) {
  return W == 8 && k >= 4 ? kApart + k - 4 : k;
}
template <int W>
__device__ __forceinline__ int64_t vector_begin(int64_t v) {
  return W == 8 ? (v & ~int64_t{31}) * 8 + (v & 31) * 4 : v * W;
}
// Returns the number of `vectors` in a row that are used: whole warps, where the runs of a vector are apart.
template <int W>
__host__ __device__ __forceinline__ int64_t usable_vectors(int64_t vectors) {
  return W == 8 ? vectors - vectors % 32 : vectors;
}

// Finds the head that aligns all arrays. Floats need an alignment of 16 bytes; so do 16-bit elements when
// `width` is 8. Four BF16 operands next to four floats need 8 bytes.
class Alignment {
 public:
  explicit Alignment(int width) : width_(width), possible_((1u << width) - 1) {}
  // Adds an array; ignores null.
  template <typename T>
  Alignment& with(const T* data) {
    if (data == nullptr) return *this;
    const uintptr_t bytes = std::is_same_v<T, Bf16> && width_ == 4 ? 8 : 16;
    for (int head = 0; head < width_; ++head) {
      uintptr_t at = reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(head) * sizeof(T);
      if (at % bytes != 0) possible_ &= ~(1u << head);
    }
    return *this;
  }
  VectorSplit split(int64_t count) const {
    for (int head = 0; head < width_; ++head) {
      if ((possible_ >> head & 1u) == 0 || head >= count) continue;
      const int64_t vectors = (count - head) / width_;
      return {count, head, width_ == 8 ? usable_vectors<8>(vectors) : vectors};
    }
    return {count, 0, 0};
  }

 private:
  int width_;
  unsigned possible_;
};

// Calls body.template at<W>(i) for vectors that begin at element i, at<1>(i) for single elements.
template <int W, typename Body>
__device__ __forceinline__ void for_each_vector(const VectorSplit& split, const Body& body) {
  int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t v = first; v < split.vectors; v += stride)
    body.template at<W>(split.head + vector_begin<W>(v));
  int64_t single = split.count - split.vectors * W;
  for (int64_t s = first; s < single; s += stride) {
    body.template at<1>(s < split.head ? s : s + split.vectors * W);
  }
}

inline constexpr int kVectorThreads = 256;

// Launches `kernel`, which takes args and the split and runs for_each_vector<W>().
template <int W, typename... Params, typename... Args>
void launch_vectors(const char* name, void (*kernel)(Params...), CudaStream stream, const VectorSplit& split,
                    const Args&... args) {
  const int64_t single = split.count - split.vectors * W;
  const unsigned blocks =
      grid_for(kernel, split.vectors > single ? split.vectors : single, kVectorThreads, kVectorThreads);
  launch(name, kernel, {.grid = dim3(blocks), .block = dim3(kVectorThreads), .stream = stream}, args...,
         split);
}

template <int W>
__device__ __forceinline__ void load(const float* from, float (&to)[W]) {
  if constexpr (W == 1) {
    to[0] = *from;
  } else {
#pragma unroll
    for (int i = 0; i < W; i += 4) {
      float4 x = *reinterpret_cast<const float4*>(from + i);
      to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
    }
  }
}

template <int W>
__device__ __forceinline__ void store(float* to, const float (&from)[W]) {
  if constexpr (W == 1) {
    *to = from[0];
  } else {
#pragma unroll
    for (int i = 0; i < W; i += 4) {
      *reinterpret_cast<float4*>(to + i) = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
    }
  }
}

// Stores W floats to global memory with st.wb, so that the compiler does not merge the paths for widths 4 and
// 1 of a kernel into four 4-byte stores.
template <int W>
__device__ __forceinline__ void store_wide(float* to, const float (&from)[W]) {
  static_assert(W == 1 || W % 4 == 0);
  if constexpr (W == 1) {
    *to = from[0];
  } else {
#pragma unroll
    for (int i = 0; i < W; i += 4)
      __stwb(reinterpret_cast<float4*>(to + i), make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]));
  }
}

// Load and store floats and 16-bit elements of a vector of for_each_vector().
template <int W>
__device__ __forceinline__ void load_vector(const float* from, float (&to)[W]) {
  if constexpr (W == 8) {
    const float4 x = *reinterpret_cast<const float4*>(from),
                 y = *reinterpret_cast<const float4*>(from + kApart);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    to[4] = y.x, to[5] = y.y, to[6] = y.z, to[7] = y.w;
  } else {
    load<W>(from, to);
  }
}

template <int W>
__device__ __forceinline__ void store_vector(float* to, const float (&from)[W]) {
  if constexpr (W == 8) {
    *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
    *reinterpret_cast<float4*>(to + kApart) = make_float4(from[4], from[5], from[6], from[7]);
  } else {
    store<W>(to, from);
  }
}

template <int W>
__device__ __forceinline__ void load_vector(const uint16_t* from, uint16_t (&to)[W]) {
  static_assert(W == 1 || W == 8);
  if constexpr (W == 1) {
    to[0] = *from;
  } else {
    const uint2 x = *reinterpret_cast<const uint2*>(from), y = *reinterpret_cast<const uint2*>(from + kApart);
    const uint32_t words[4] = {x.x, x.y, y.x, y.y};
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
  }
}

template <int W>
__device__ __forceinline__ void store_vector(uint16_t* to, const uint16_t (&from)[W]) {
  static_assert(W == 1 || W == 8);
  if constexpr (W == 1) {
    *to = from[0];
  } else {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = from[2 * i] | static_cast<uint32_t>(from[2 * i + 1]) << 16;
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    *reinterpret_cast<uint2*>(to + kApart) = make_uint2(words[2], words[3]);
  }
}

// Pack, load and store BF16 operands, which are widened when loaded and rounded when stored
// (kernels/math/bf16.h).
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
#ifdef __CUDA_ARCH__
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);  // one instruction rounds both values
  uint32_t word;
  memcpy(&word, &both, sizeof word);
  return word;
#else
  return narrow<Bf16>(low).bits | static_cast<uint32_t>(narrow<Bf16>(high).bits) << 16;
#endif
}

template <int W>
__device__ __forceinline__ void load(const Bf16* from, float (&to)[W]) {
  static_assert(W == 1 || W == 8);
  if constexpr (W == 1) {
    to[0] = widen(*from);
  } else {
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = bits_float(words[i] << 16);
      to[2 * i + 1] = bits_float(words[i] & 0xffff0000u);
    }
  }
}

template <int W>
__device__ __forceinline__ void store(Bf16* to, const float (&from)[W]) {
  static_assert(W == 1 || W == 4 || W == 8);
  if constexpr (W == 1) {
    *to = narrow<Bf16>(from[0]);
  } else if constexpr (W == 4) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]));
  } else {
    *reinterpret_cast<uint4*>(to) = make_uint4(pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]),
                                               pack_bf16(from[4], from[5]), pack_bf16(from[6], from[7]));
  }
}

// The number of elements of S in a 16-byte access.
template <typename S>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(S));

// Sets `kept` to 0 where the vector x is not finite. Such vectors are rare; the test costs an instruction per
// value.
template <int W>
__device__ __forceinline__ void forget_not_finite(const float (&x)[W], float* kept) {
  float none = 0.0f;
#pragma unroll
  for (int k = 0; k < W; ++k) none = fmaf(x[k], 0.0f, none);
  if (none == 0.0f || kept == nullptr) return;
  for (int k = 0; k < W; ++k) {
    if (!is_finite(x[k])) kept[element_of<W>(k)] = 0.0f;
  }
}

// Adds x to `to`.
template <int W>
__device__ __forceinline__ void add(const float (&x)[W], float (&to)[W]) {
#pragma unroll
  for (int k = 0; k < W; ++k) to[k] += x[k];
}

// Adds scale * x to `to`, rounded once.
template <int W>
__device__ __forceinline__ void add(float scale, const float (&x)[W], float (&to)[W]) {
#pragma unroll
  for (int k = 0; k < W; ++k) to[k] = fmaf(scale, x[k], to[k]);
}

}  // namespace gradwire::cuda
