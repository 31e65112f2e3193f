// A row of up to 1024 floats held in the registers of a group of G lanes, four at a time: read once, used in
// as many passes as the op needs, written once. Short rows share a warp (G = 8 or 16), so lanes do not idle.
#pragma once

#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"

namespace gradwire::cuda {

inline constexpr int kRowThreads = 256;
inline constexpr int64_t kLongestSlicedRow = 1024;

template <int G, int Items>
struct RowSlice {
  static constexpr int kRowsPerBlock = kRowThreads / G;
  float v[Items][4];

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % G; }
  // The group's number within its block.
  static __device__ __forceinline__ int group() { return static_cast<int>(threadIdx.x) / G; }
  // First of the four columns of item j.
  static __device__ __forceinline__ int column(int j) { return (j * G + lane()) * 4; }

  // `width` is a multiple of 4 and the row 16-byte aligned; what lies outside, or in a row that is not live,
  // is 0.
  __device__ __forceinline__ void read(const float* row, int width, bool live) {
#pragma unroll
    for (int j = 0; j < Items; ++j) {
      if (live && column(j) < width) {
        load<4>(row + column(j), v[j]);
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) v[j][k] = 0.0f;
      }
    }
  }
  __device__ __forceinline__ void write(float* row, int width, bool live) const {
#pragma unroll
    for (int j = 0; j < Items; ++j) {
      if (live && column(j) < width) store<4>(row + column(j), v[j]);
    }
  }
};

// Calls run.template operator()<G, Items>() with the smallest slice that holds `width` (at most 1024) floats.
template <typename Run>
void with_row_slice(int64_t width, const Run& run) {
  if (width <= 32) return run.template operator()<8, 1>();
  if (width <= 64) return run.template operator()<16, 1>();
  if (width <= 128) return run.template operator()<32, 1>();
  if (width <= 256) return run.template operator()<32, 2>();
  if (width <= 512) return run.template operator()<32, 4>();
  return run.template operator()<32, 8>();
}

template <int G>
LaunchConfig row_slice_launch(CudaStream stream, int64_t rows) {
  constexpr int64_t kRows = kRowThreads / G;
  return {.grid = dim3(static_cast<unsigned>((rows + kRows - 1) / kRows)),
          .block = dim3(kRowThreads),
          .stream = stream};
}

}  // namespace gradwire::cuda
