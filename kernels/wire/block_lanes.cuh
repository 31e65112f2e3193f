// Lanes of block formats on CUDA (kernels/wire/block.h): the threads that work on a block together, a warp
// or, for formats with long blocks, a thread block.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/vector.cuh"
#include "kernels/math/small_float.h"
#include "kernels/wire/block.h"
#include "kernels/wire/topk.h"
#include "runtime/device/launch.cuh"

namespace gradwire::cuda {
namespace {  // internal to each file: the shim finds only the shared variables of internal functions

constexpr int kBlockThreads = 256;
constexpr int kBlockWarps = kBlockThreads / 32;

// Computes the residuals of sums s that are sent as `sent`, as rest_of(). A sum tests for values that are not
// finite, which are rare.
template <int W>
__device__ __forceinline__ void to_residuals(const float* s, const float* sent, float unit, bool far,
                                             float (&left)[W]) {
  float none = 0.0f;
#pragma unroll
  for (int k = 0; k < W; ++k) {
    left[k] = (s[k] - sent[k]) * unit;
    none = fmaf(left[k], 0.0f, none);
  }
  if (none == 0.0f) return;
#pragma unroll
  for (int k = 0; k < W; ++k)
    left[k] = far ? rest_of<true>(s[k], sent[k], unit) : rest_of<false>(s[k], sent[k], unit);
}

// Applies the levels h = n/2, n/4, ..., 1 of a butterfly.
template <typename Lanes>
__device__ __forceinline__ void butterfly(const Lanes& lanes, float* x, int n) {
  for (int h = n / 2; h > 0; h /= 2) {
    lanes.each(n / 2, [=](int pair) {
      const int i = 2 * pair - (pair & (h - 1));
      const float a = x[i], b = x[i + h];
      x[i] = a + b;
      x[i + h] = a - b;
    });
  }
}

// A warp per block.
struct WarpLanes {
  static constexpr int kTeams = kBlockWarps, kSize = 32;
  int lane = static_cast<int>(threadIdx.x) % 32, team = static_cast<int>(threadIdx.x) / 32;

  __device__ __forceinline__ void sync() const { __syncwarp(); }
  template <typename Body>
  __device__ __forceinline__ void each(int n, const Body& body) const {
#pragma unroll 2  // unrolling further spills
    for (int i = lane; i < n; i += 32) body(i);
    __syncwarp();
  }
  template <typename Body>
  __device__ __forceinline__ void each_rarely(int n, const Body& body) const {
#pragma unroll 1
    for (int i = lane; i < n; i += 32) body(i);
    __syncwarp();
  }
  template <typename Value>
  __device__ __forceinline__ uint32_t max(int n, const Value& value) const {
    uint32_t largest = 0;
    for (int i = lane; i < n; i += 32) {
      const uint32_t x = value(i);
      largest = x > largest ? x : largest;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, largest, distance);
      largest = other > largest ? other : largest;
    }
    return largest;
  }
  template <typename Value>
  __device__ __forceinline__ float sum(int n, const Value& value) const {
    static_assert(kSumLanes == 32);
    float sum = 0.0f;
#pragma unroll 2
    for (int i = lane; i < n; i += 32) sum += value(i);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    return sum;
  }
  template <typename Test>
  __device__ __forceinline__ int count(int n, const Test& test) const {
    int all = 0;
    for (int begin = 0; begin < n; begin += 32) {
      all += __popc(__ballot_sync(0xffffffffu, begin + lane < n && test(begin + lane)));
    }
    return all;
  }
  template <typename Test, typename Take>
  __device__ __forceinline__ void pick(int n, const Test& test, const Take& take) const {
    int before = 0;
    for (int begin = 0; begin < n; begin += 32) {
      const int i = begin + lane;
      const bool mine = i < n && test(i);
      const uint32_t all = __ballot_sync(0xffffffffu, mine);
      if (mine) take(before + __popc(all & ((1u << lane) - 1u)), i);
      before += __popc(all);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void hadamard(float* x, int n) const {
    butterfly(*this, x, n);
  }
};

// A thread block per block, for formats with long blocks. `warps` is in shared memory: 2 * kBlockWarps words
// of these functions, kTable words of the format, and pick_largest()'s last threshold.
struct ThreadBlockLanes {
  static constexpr int kTeams = 1, kSize = kBlockThreads, kTable = 64;
  uint32_t* warps;
  int lane = static_cast<int>(threadIdx.x), team = 0;

  __device__ __forceinline__ void sync() const { __syncthreads(); }
  template <typename Body>
  __device__ __forceinline__ void each(int n, const Body& body) const {
    for (int i = lane; i < n; i += kBlockThreads) body(i);
    __syncthreads();
  }
  // Stores `mine` of each warp's first lane in warps[]. Ends with a barrier, after which all threads may read
  // warps[].
  __device__ __forceinline__ void share(uint32_t mine) const {
    __syncthreads();  // the earlier values have been read
    if (lane % 32 == 0) warps[lane / 32] = mine;
    __syncthreads();
  }
  template <typename Value>
  __device__ __forceinline__ uint32_t max(int n, const Value& value) const {
    uint32_t largest = 0;
    for (int i = lane; i < n; i += kBlockThreads) {
      const uint32_t x = value(i);
      largest = x > largest ? x : largest;
    }
    share(__reduce_max_sync(0xffffffffu, largest));
    for (int w = 0; w < kBlockWarps; ++w) largest = warps[w] > largest ? warps[w] : largest;
    return largest;
  }
  // Computes the sum in one warp, because the sums of long blocks are short.
  template <typename Value>
  __device__ __forceinline__ float sum(int n, const Value& value) const {
    float sum = 0.0f;
    if (lane < 32) sum = WarpLanes{}.sum(n, value);
    share(float_bits(sum));
    return bits_float(warps[0]);
  }
  template <typename Test>
  __device__ __forceinline__ int count(int n, const Test& test) const {
    int all = 0;
    for (int begin = 0; begin < n; begin += kBlockThreads) {
      all += __popc(__ballot_sync(0xffffffffu, begin + lane < n && test(begin + lane)));
    }
    share(static_cast<uint32_t>(all));
    all = 0;
    for (int w = 0; w < kBlockWarps; ++w) all += static_cast<int>(warps[w]);
    return all;
  }
  template <typename Test, typename Take>
  __device__ __forceinline__ void pick(int n, const Test& test, const Take& take) const {
    int before = 0;
    for (int begin = 0; begin < n; begin += kBlockThreads) {
      const int i = begin + lane;
      const bool mine = i < n && test(i);
      const uint32_t all = __ballot_sync(0xffffffffu, mine);
      share(static_cast<uint32_t>(__popc(all)));
      int place = before + __popc(all & ((1u << (lane % 32)) - 1u));
      for (int w = 0; w < kBlockWarps; ++w) {
        const int here = static_cast<int>(warps[w]);
        place += w < lane / 32 ? here : 0;
        before += here;
      }
      if (mine) take(place, i);
    }
    __syncthreads();
  }
  __device__ __forceinline__ void hadamard(float* x, int n) const { butterfly(*this, x, n); }
  // Calls body(warp, k) for k in [0, n), each in one warp.
  template <typename Body>
  __device__ __forceinline__ void each_team(int n, const Body& body) const {
#pragma unroll 1
    for (int k = lane / 32; k < n; k += kBlockWarps) body(WarpLanes{}, k);
    __syncthreads();
  }
  __device__ __forceinline__ uint32_t* table() const {
    return warps + 2 * kBlockWarps;
  }

  // Does the same as pick_largest() of topk.h. Each thread holds up to 16 keys in registers, in groups of
  // four neighbors, so that a step of the search takes one barrier. The search begins at the threshold of the
  // block before, and guesses by the number of keys found; after some steps it bisects.
  __device__ __forceinline__ void pick_largest(int n, int k, const Magnitudes& key, float* places) const {
    constexpr int kKeys = 4096 / kBlockThreads, kRow = 4 * kBlockThreads;
    uint32_t keys[kKeys];  // 0 after the end, after all other keys
#pragma unroll
    for (int j = 0; j < kKeys; j += 4) {
      float four[4] = {};
      if (4 * lane + j / 4 * kRow < n) load<4>(key.values + 4 * lane + j / 4 * kRow, four);
#pragma unroll
      for (int c = 0; c < 4; ++c) keys[j + c] = float_bits(four[c]) & 0x7fffffffu;
    }
    uint32_t& last = warps[2 * kBlockWarps + kTable];
    uint32_t least = 0, turn = 0;  // at the end, at most the k-th largest, and more than the next smaller key
    uint32_t above = 1u << 31, tried = last;
    const float wanted = __logf(static_cast<float>(k));
    int reach = 0;
#pragma unroll 1
    for (int step = 0; above - least > 1 && reach != k; ++step) {
      reach = total(number(keys, [=](uint32_t x) { return x >= tried; }), ++turn % 2);
      (reach >= k ? least : above) = tried;
      // The tail of a normal distribution is about this steep. Later steps are longer.
      const float by = 3e6f * fabsf(__logf(static_cast<float>(reach) + 0.5f) - wanted);
      const uint32_t half = (above - least) / 2, guess = (static_cast<uint32_t>(by) + 1u) << (step & 7);
      const uint32_t move = guess < half && step < 8 ? guess : half;
      tried = reach >= k ? least + move : above - move;
    }
    if (lane == 0) last = least > 0 ? least : 1u;  // read after barriers
    uint32_t taken = 0;
    int place[kKeys / 4];
#pragma unroll
    for (int j = 0; j < kKeys; ++j) taken |= (keys[j] >= least ? 1u : 0u) << j;
    if (reach != k) {  // of the keys that equal `least`, the first few
      const int equal = k - total(number(keys, [=](uint32_t x) { return x > least; }), ++turn % 2);
      uint32_t equals = 0;
#pragma unroll
      for (int j = 0; j < kKeys; ++j) equals |= (keys[j] == least ? 1u : 0u) << j;
      before(equals, ++turn % 2, place);
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        if ((equals >> j & 1u) != 0 && place[j / 4]++ >= equal) taken &= ~(1u << j);
      }
    }
    before(taken, ++turn % 2, place);
#pragma unroll
    for (int row = 0; row < kKeys / 4; ++row) {
      for (uint32_t of_row = taken >> (4 * row) & 15u; of_row != 0; of_row &= of_row - 1)
        put_place(places, place[row]++, 4 * lane + row * kRow + __ffs(static_cast<int>(of_row)) - 1);
    }
    __syncthreads();
  }

 private:
  template <int kMax, typename Test>
  __device__ __forceinline__ static int number(const uint32_t (&keys)[kMax], const Test& test) {
    int number = 0;
#pragma unroll
    for (int j = 0; j < kMax; ++j) number += test(keys[j]) ? 1 : 0;
    return number;
  }
  // Returns the sum of `mine` over all threads. Calls of total() and before() alternate between the halves of
  // warps[], so that one barrier suffices.
  __device__ __forceinline__ int total(int mine, uint32_t half) const {
    uint32_t* const sums = warps + half * kBlockWarps;
    const int sum = __reduce_add_sync(0xffffffffu, mine);
    if (lane % 32 == 0) sums[lane / 32] = static_cast<uint32_t>(sum);
    __syncthreads();
    int all = 0;
#pragma unroll
    for (int w = 0; w < kBlockWarps; ++w) all += static_cast<int>(sums[w]);
    return all;
  }
  // Computes how many set bits precede each group of four bits of `mine`: all threads' groups 0, then their
  // groups 1, and so on.
  __device__ __forceinline__ void before(uint32_t mine, uint32_t half, int (&place)[4]) const {
    static_assert(kBlockWarps == 8);
    uint32_t* const sums = warps + half * kBlockWarps;
    uint32_t counts = 0;  // a byte per group; a warp has at most 128 of a group
#pragma unroll
    for (int row = 0; row < 4; ++row)
      counts |= static_cast<uint32_t>(__popc(mine >> (4 * row) & 15u)) << (8 * row);
    const uint32_t sum = sum_to(counts);
    if (lane % 32 == 31) sums[lane / 32] = sum;
    __syncthreads();
    const uint32_t of_warp = sums[lane % 8] >> (lane % 32 / 8 * 8) & 255u;  // of warp lane % 8
    const uint32_t earlier = sum_to(of_warp) - of_warp;
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      place[row] = static_cast<int>(__shfl_sync(0xffffffffu, earlier, 8 * row + lane / 32) +
                                    ((sum - counts) >> (8 * row) & 255u));
    }
  }
  // Returns the sum over the warp's threads up to this one.
  __device__ __forceinline__ uint32_t sum_to(uint32_t sum) const {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t earlier = __shfl_up_sync(0xffffffffu, sum, static_cast<unsigned>(distance));
      sum += lane % 32 >= distance ? earlier : 0;
    }
    return sum;
  }
};

template <typename F>
using LanesFor = std::conditional_t<(F::kMaxBlock > 512), ThreadBlockLanes, WarpLanes>;

__device__ __forceinline__ WarpLanes make_lanes(const WarpLanes*) {
  return {};
}
__device__ __forceinline__ ThreadBlockLanes make_lanes(const ThreadBlockLanes*) {
  constexpr int kLast = 2 * kBlockWarps + ThreadBlockLanes::kTable;
  __shared__ uint32_t warps[kLast + 1];
  if (threadIdx.x == 0) warps[kLast] = 0x3f800000u;
  __syncthreads();
  return {warps};
}

}  // namespace
}  // namespace gradwire::cuda
