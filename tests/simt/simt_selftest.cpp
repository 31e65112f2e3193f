// Tests that correct kernels give correct results in the shim. simt_bugs_selftest.cpp plants bugs.
#include <gtest/gtest.h>

#include <numeric>
#include <thread>
#include <vector>

#include "runtime/device/launch.cuh"
#include "tests/support/expect.h"

namespace gradwire::simt {
namespace {

using cuda::launch;

__device__ float warp_sum(float v) {
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
  return v;
}

__global__ void __launch_bounds__(256) sum_kernel(const float* __restrict__ x, float* sums, int n) {
  __shared__ float partial[8];
  float v = 0.0f;
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * 4; i < n;
       i += static_cast<int>(gridDim.x * blockDim.x) * 4) {
    float4 four = *reinterpret_cast<const float4*>(x + i);
    v += four.x + four.y + four.z + four.w;
  }
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0.0f;
    for (float p : partial) total += p;
    sums[blockIdx.x] = total;
  }
}

TEST(Simt, BlockReductionIsCorrect) {
  std::vector<float> x(4 * 256 * 8 * 3);
  std::iota(x.begin(), x.end(), 0.0f);
  for (float& v : x) v = static_cast<float>(static_cast<int>(v) % 17);
  std::vector<float> sums(8);
  launch("sum", sum_kernel, {.grid = dim3(8), .block = dim3(256)}, x.data(), sums.data(),
         static_cast<int>(x.size()));
  EXPECT_EQ(std::accumulate(sums.begin(), sums.end(), 0.0f), std::accumulate(x.begin(), x.end(), 0.0f));
}

__global__ void scan_kernel(int* data) {
  int lane = static_cast<int>(threadIdx.x), v = data[lane];
  for (int d = 1; d < 32; d *= 2) {
    int other = __shfl_up_sync(0xffffffffu, v, static_cast<unsigned>(d));
    if (lane >= d) v += other;
  }
  data[lane] = v;
}

TEST(Simt, WarpScanIsCorrect) {
  std::vector<int> data(32);
  std::iota(data.begin(), data.end(), 1);
  launch("scan", scan_kernel, {.block = dim3(32)}, data.data());
  for (int i = 0; i < 32; ++i) EXPECT_EQ(data[i], (i + 1) * (i + 2) / 2);
}

// Uses a shared array in a template with two instantiations, each of which has its own array.
template <int kTile>
__global__ void transpose_kernel(const int* in, int* out, int n) {
  __shared__ int tile[kTile][kTile + 1];
  int x = static_cast<int>(blockIdx.x * kTile + threadIdx.x),
      y = static_cast<int>(blockIdx.y * kTile + threadIdx.y);
  if (x < n && y < n) tile[threadIdx.y][threadIdx.x] = in[y * n + x];
  __syncthreads();
  x = static_cast<int>(blockIdx.y * kTile + threadIdx.x),
  y = static_cast<int>(blockIdx.x * kTile + threadIdx.y);
  if (x < n && y < n) out[y * n + x] = tile[threadIdx.x][threadIdx.y];
}

TEST(Simt, TransposeThroughSharedMemoryIsCorrectForEveryInstantiation) {
  for (int n : {1, 7, 33}) {
    std::vector<int> in(n * n), out(in.size());
    std::iota(in.begin(), in.end(), 0);
    auto tiles8 = static_cast<unsigned>((n + 7) / 8), tiles16 = static_cast<unsigned>((n + 15) / 16);
    launch("transpose8", transpose_kernel<8>, {.grid = dim3(tiles8, tiles8), .block = dim3(8, 8)}, in.data(),
           out.data(), n);
    for (int i = 0; i < n * n; ++i) ASSERT_EQ(out[i], in[i % n * n + i / n]);
    launch("transpose16", transpose_kernel<16>, {.grid = dim3(tiles16, tiles16), .block = dim3(16, 16)},
           out.data(), in.data(), n);
    for (int i = 0; i < n * n; ++i) ASSERT_EQ(in[i], i);
  }
}

__global__ void histogram_kernel(const unsigned char* data, int n, unsigned* bins) {
  GW_DYNAMIC_SHARED(unsigned, local);
  for (unsigned i = threadIdx.x; i < 256; i += blockDim.x) local[i] = 0;
  __syncthreads();
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < n;
       i += static_cast<int>(gridDim.x * blockDim.x)) {
    atomicAdd(&local[data[i]], 1u);
  }
  __syncthreads();
  for (unsigned i = threadIdx.x; i < 256; i += blockDim.x) atomicAdd(&bins[i], local[i]);
}

TEST(Simt, HistogramWithAtomicsIsCorrect) {
  std::vector<unsigned char> data(10007);
  std::vector<unsigned> bins(256, 0), expected(256, 0);
  for (size_t i = 0; i < data.size(); ++i) ++expected[data[i] = static_cast<unsigned char>(i * i % 251)];
  launch("histogram", histogram_kernel,
         {.grid = dim3(cuda::grid_for(histogram_kernel, static_cast<int64_t>(data.size()), 96, 96, 1024)),
          .block = dim3(96),
          .shared_bytes = 1024},
         data.data(), static_cast<int>(data.size()), bins.data());
  EXPECT_EQ(bins, expected);
}

__global__ void votes_kernel(unsigned* out) {
  unsigned lane = threadIdx.x;
  unsigned odd = __ballot_sync(0xffffffffu, lane % 2);
  unsigned any = static_cast<unsigned>(__any_sync(0xffffffffu, lane == 7));
  unsigned all = static_cast<unsigned>(__all_sync(0xffffffffu, lane == 7));
  unsigned sum = __reduce_add_sync(0xffffffffu, lane);
  unsigned same = __match_any_sync(0xffffffffu, lane / 8);
  int least = __reduce_min_sync(0xffffffffu, static_cast<int>(lane) - 5);
  unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  double mine = lane + 0.5, top = __shfl_down_sync(half, mine, 4, 16), pair = __shfl_sync(half, mine, 1, 2);
  int count = __syncthreads_count(lane < 3), either = __syncthreads_or(lane == 3),
      both = __syncthreads_and(lane < 32);
  bool right = odd == 0xaaaaaaaau && any == 1 && all == 0 && sum == 496 && same == 0xffu << (lane / 8 * 8) &&
               least == -5 && top == (lane % 16 < 12 ? mine + 4 : mine) && pair == (lane | 1u) + 0.5 &&
               count == 3 && either == 1 && both == 1;
  out[lane] = right;
}

TEST(Simt, VotesReductionsAndSegmentedShufflesAreCorrect) {
  std::vector<unsigned> out(32, 0);
  launch("votes", votes_kernel, {.block = dim3(32)}, out.data());
  EXPECT_EQ(out, std::vector<unsigned>(32, 1));
}

__global__ void lock_kernel(unsigned* lock, int* counter) {
  while (atomicCAS(lock, 0u, 1u) != 0u) {
  }
  ++*counter;
  atomicExch(lock, 0u);
}

TEST(Simt, SpinLocksMakeProgress) {
  unsigned lock = 0;
  int counter = 0;
  launch("lock", lock_kernel, {.grid = dim3(4), .block = dim3(64)}, &lock, &counter);
  EXPECT_EQ(counter, 4 * 64);
}

TEST(Simt, ThreadsThatLaunchAtOnceTakeTurns) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 50; ++i) {
        std::vector<int> data(32, 1);
        EXPECT_EQ(testing::error_of([&] { launch("scan", scan_kernel, {.block = dim3(32)}, data.data()); }),
                  "no error");
        EXPECT_EQ(data.back(), 32);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

__global__ void places_kernel(int* hits) {
  unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  ++hits[block * blockDim.x * blockDim.y * blockDim.z + thread];
}

TEST(Simt, EveryThreadOfEveryBlockRunsOnce) {
  std::vector<int> hits(5 * 3 * 2 * 7 * 5 * 3, 0);
  launch("places", places_kernel, {.grid = dim3(5, 3, 2), .block = dim3(7, 5, 3)}, hits.data());
  EXPECT_EQ(hits, std::vector<int>(hits.size(), 1));
  launch("nothing", places_kernel, {.grid = dim3(0), .block = dim3(7)}, static_cast<int*>(nullptr));
}

__global__ void __launch_bounds__(1024) wide_kernel(float* out) {
  __shared__ float x[1024];
  x[threadIdx.x] = static_cast<float>(threadIdx.x);
  __syncthreads();
  out[blockIdx.x * 1024 + threadIdx.x] = x[1023 - threadIdx.x];
}

TEST(Simt, FullBlocksRun) {
  std::vector<float> out(3 * 1024);
  launch("wide", wide_kernel, {.grid = dim3(3), .block = dim3(1024)}, out.data());
  for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], static_cast<float>(1023 - i % 1024));
}

}  // namespace
}  // namespace gradwire::simt
