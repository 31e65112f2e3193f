// Reductions over a group of lanes, a warp or a block. All participants get the result with the same bits:
// the butterfly adds the same pairs on every lane, and the order is fixed.
#pragma once

#include <limits>

#include "runtime/device/launch.cuh"

namespace gradwire::cuda {

inline constexpr unsigned kFullWarp = 0xffffffffu;

struct Sum {
  static constexpr float kIdentity = 0.0f;
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
struct Max {
  static constexpr float kIdentity = -std::numeric_limits<float>::infinity();
  __device__ __forceinline__ float operator()(float a, float b) const { return a > b ? a : b; }
};

// Reduces over aligned groups of G lanes (a power of two). All lanes of the warp must call it.
template <int G, typename Combine>
__device__ __forceinline__ float group_reduce(float x, Combine combine) {
#pragma unroll
  for (int distance = G / 2; distance > 0; distance /= 2) {
    x = combine(x, __shfl_xor_sync(kFullWarp, x, distance));
  }
  return x;
}

// Reduces over a block of at most 32 whole warps. `shared` (32) may be reused right after the call.
template <typename Combine>
__device__ __forceinline__ float block_reduce(float x, float* shared, Combine combine) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  x = group_reduce<32>(x, combine);
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  x = group_reduce<32>(lane < warps ? shared[lane] : Combine::kIdentity, combine);
  __syncthreads();
  return x;
}

// Returns the number of threads of a block that walks one row of `steps` accesses: whole warps, at most 256.
inline unsigned row_threads(int64_t steps) {
  int64_t threads = (steps + 31) / 32 * 32;
  return static_cast<unsigned>(threads < 32 ? 32 : threads > 256 ? 256 : threads);
}

}  // namespace gradwire::cuda
