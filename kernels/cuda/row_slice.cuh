// A row of up to 1024 elements held as floats in the registers of a group of G lanes, V at a time (16 bytes
// of the storage type: 4 of FP32, 8 of BF16): read once, used in as many passes as the op needs, written
// once. Short rows share a warp (G = 8 or 16), so that lanes are not idle.
#pragma once

#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"

namespace gradwire::cuda {

inline constexpr int kRowThreads = 256;
inline constexpr int64_t kLongestSlicedRow = 1024;

template <int G, int Items, int V>
struct RowSlice {
  static constexpr int kRowsPerBlock = kRowThreads / G;
  static constexpr int kWidth = G * Items * V;
  float v[Items][V];

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % G; }
  // Returns the group's number within its block.
  static __device__ __forceinline__ int group() { return static_cast<int>(threadIdx.x) / G; }
  // Returns the first of the V columns of item j.
  static __device__ __forceinline__ int column(int j) { return (j * G + lane()) * V; }

  // Reads the slice; 0 beyond the width, and everywhere if the row is not live. `width` is a multiple of V
  // and the row is 16-byte aligned.
  template <typename T>
  __device__ __forceinline__ void read(const T* row, int width, bool live) {
#pragma unroll
    for (int j = 0; j < Items; ++j) {
      if (live && column(j) < width) {
        load<V>(row + column(j), v[j]);
      } else {
#pragma unroll
        for (int k = 0; k < V; ++k) v[j][k] = 0.0f;
      }
    }
  }
  template <typename T>
  __device__ __forceinline__ void write(T* row, int width, bool live) const {
#pragma unroll
    for (int j = 0; j < Items; ++j) {
      if (live && column(j) < width) store<V>(row + column(j), v[j]);
    }
  }
};

// Calls run.template operator()<G, Items>() with the smallest slice for `width` (at most 1024) elements.
template <int V, typename Run>
void with_row_slice(int64_t width, const Run& run) {
  if (width <= 8 * V) return run.template operator()<8, 1>();
  if (width <= 16 * V) return run.template operator()<16, 1>();
  if (width <= 32 * V) return run.template operator()<32, 1>();
  if (width <= 64 * V) return run.template operator()<32, 2>();
  if constexpr (V == 4) {
    if (width <= 128 * V) return run.template operator()<32, 4>();
    return run.template operator()<32, 8>();
  } else {
    return run.template operator()<32, 4>();
  }
}

template <int G>
LaunchConfig row_slice_launch(CudaStream stream, int64_t rows) {
  constexpr int64_t kRows = kRowThreads / G;
  return {.grid = dim3(static_cast<unsigned>((rows + kRows - 1) / kRows)),
          .block = dim3(kRowThreads),
          .stream = stream};
}

}  // namespace gradwire::cuda
