// Tests that the shim detects each kind of planted bug.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/cuda/copies.cuh"
#include "runtime/device/launch.cuh"
#include "tests/support/expect.h"

namespace gradwire::simt {
namespace {

using cuda::launch;
using testing::expect_has;

__device__ float warp_sum(float v) {
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
  return v;
}

// Returns the text of the Failure that `body` throws, or "" if `body` throws none.
std::string failure_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "";
}

// Returns the failures with each of ten seeds, so that detection does not depend on luck.
std::vector<std::string> failures_of(const std::function<void()>& body) {
  std::vector<std::string> texts;
  uint64_t before = options().seed;
  for (options().seed = 100; options().seed < 110; ++options().seed) texts.push_back(failure_of(body));
  options().seed = before;
  return texts;
}

// Writes a shared array, then reads elements that other threads wrote. The bug is a missing barrier between
// the writes and the reads.
__global__ void reverse_kernel(int* data, bool with_barrier) {
  __shared__ int copy[64];
  copy[threadIdx.x] = data[threadIdx.x];
  if (with_barrier) __syncthreads();
  data[threadIdx.x] = copy[63 - threadIdx.x];
}

TEST(SimtCatches, MissingBarrier) {
  std::vector<int> data(64, 1);
  auto run = [&](bool barrier) {
    return failures_of([&] {
      std::iota(data.begin(), data.end(), 0);
      launch("reverse", reverse_kernel, {.block = dim3(64)}, data.data(), barrier);
    });
  };
  for (const auto& text : run(true)) EXPECT_EQ(text, "");
  for (const auto& text : run(false)) expect_has(text, {"reverse", "depends on the order", "parameter 0"});
}

// Copies an array to shared memory in the background. The bug is that the thread does not wait for its copy,
// or only for copies before it.
template <int kNewest>
__global__ void copies_kernel(int* data, bool waits_at_all) {
  __shared__ __align__(16) int copy[64];
  cuda::copy_async<4>(&copy[threadIdx.x], &data[threadIdx.x], true);
  cuda::end_copies();
  if (waits_at_all) cuda::wait_for_copies<kNewest>();
  const int early = copy[threadIdx.x];
  cuda::wait_for_copies<0>();
  data[threadIdx.x] = early;
}

TEST(SimtCatches, MissingWaitForACopyToSharedMemory) {
  std::vector<int> data(64);
  auto copied = [&](auto* kernel, bool waits) {  // how often, in ten runs
    return std::ranges::count_if(failures_of([&] {
                                   std::iota(data.begin(), data.end(), 0);
                                   launch("copies", kernel, {.block = dim3(64)}, data.data(), waits);
                                   if (data[4] != 4) throw Failure("poison");
                                 }),
                                 [](const std::string& failure) { return failure.empty(); });
  };
  EXPECT_EQ(copied(copies_kernel<0>, true), 10);
  EXPECT_EQ(copied(copies_kernel<1>, true), 0);
  EXPECT_EQ(copied(copies_kernel<0>, false), 0);
}

// Ends with a copy in flight.
__global__ void forgotten_copy_kernel(int* data) {
  __shared__ int copy[1];
  cuda::copy_async<4>(copy, data, true);
}

TEST(SimtCatches, ThreadsThatEndBeforeTheirCopies) {
  int data = 0;
  for (const auto& text :
       failures_of([&] { launch("forgotten", forgotten_copy_kernel, {.block = dim3(1)}, &data); }))
    expect_has(text, {"forgotten", "ended before it waited for its copies"});
}

// Omits a barrier at the end of a loop, so a fast warp overwrites data that a slow warp has not read yet.
__global__ void rounds_kernel(const float* x, float* out, bool with_second_barrier) {
  __shared__ float partial[4];
  for (int round = 0; round < 3; ++round) {
    float v = warp_sum(x[round * 128 + static_cast<int>(threadIdx.x)]);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x == 0) out[round] = partial[0] + partial[1] + partial[2] + partial[3];
    if (with_second_barrier) __syncthreads();
  }
}

TEST(SimtCatches, MissingBarrierBeforeReuseOfSharedMemoryAcrossShuffles) {
  std::vector<float> x(3 * 128), out(3);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i / 128 + 1);
  auto run = [&](bool barrier) {
    return failure_of(
        [&] { launch("rounds", rounds_kernel, {.block = dim3(128)}, x.data(), out.data(), barrier); });
  };
  EXPECT_EQ(run(true), "");
  EXPECT_EQ(out, (std::vector<float>{128, 256, 384}));
  expect_has(run(false), {"depends on the order"});
}

__global__ void uninitialized_kernel(float* out, bool initialize) {
  __shared__ float x[32];
  GW_DYNAMIC_SHARED(float, y);
  if (threadIdx.x != 5 || initialize) x[threadIdx.x] = 1.0f, y[threadIdx.x] = 1.0f;
  __syncwarp();
  out[threadIdx.x] = x[threadIdx.x ^ 1u];
  out[32 + threadIdx.x] = y[threadIdx.x ^ 1u];
}

TEST(SimtCatches, UninitializedSharedValueInEveryBlock) {
  std::vector<float> out(64);
  auto run = [&](bool initialize) {
    launch("uninitialized", uninitialized_kernel, {.grid = dim3(3), .block = dim3(32), .shared_bytes = 128},
           out.data(), initialize);
  };
  run(true);
  EXPECT_EQ(out, std::vector<float>(64, 1.0f));
  // Either two schedules differ, or the result is poison. The result never contains values of the previous
  // launch.
  for (const auto& text : failures_of([&] { run(false); })) {
    if (!text.empty()) continue;
    EXPECT_NE(out[4], 1.0f);
    EXPECT_NE(out[36], 1.0f);
  }
}

__global__ void float_atomic_kernel(const float* x, float* sum) {
  atomicAdd(sum, x[threadIdx.x]);
}

TEST(SimtCatches, FloatAtomicsWhoseSumDependsOnTheOrder) {
  std::vector<float> x(256), sum(1);
  for (size_t i = 0; i < x.size(); ++i) x[i] = 1.0f / static_cast<float>(i + 1);
  expect_has(failure_of([&] {
               launch("float_atomic", float_atomic_kernel, {.block = dim3(256)}, x.data(), sum.data());
             }),
             {"float_atomic", "depends on the order"});
}

__global__ void skip_kernel(float* data, int skipper) {
  if (static_cast<int>(threadIdx.x) == skipper) return;
  data[threadIdx.x] = __shfl_xor_sync(0xffffffffu, data[threadIdx.x], 1);
}

TEST(SimtCatches, LanesThatSkipAShuffle) {
  std::vector<float> data(64);
  expect_has(
      failure_of([&] { launch("skip", skip_kernel, {.block = dim3(64)}, data.data(), 37); }),
      {"kernel 'skip'", "block (0,0,0)", "will not come", "warp 1: ", "lanes 5 exited",
       "lanes 0-4,6-31 wait at __shfl_sync (4 bytes) with mask 0xffffffff", "simt_bugs_selftest.cpp:"});
  EXPECT_EQ(failure_of([&] { launch("skip", skip_kernel, {.block = dim3(64)}, data.data(), -1); }), "");
}

__global__ void detour_kernel(int* data) {
  int v = data[threadIdx.x];
  if (threadIdx.x < 16) {
    v = __shfl_sync(0xffffffffu, v, 0);
  } else {
    __syncwarp(0xffffffffu);
  }
  data[threadIdx.x] = v;
}

TEST(SimtCatches, LanesThatWaitAtDifferentCollectives) {
  std::vector<int> data(32);
  expect_has(failure_of([&] { launch("detour", detour_kernel, {.block = dim3(32)}, data.data()); }),
             {"lanes 0-15 wait at __shfl_sync", "lanes 16-31 wait at __syncwarp"});
}

__global__ void mask_kernel(unsigned mask) {
  __syncwarp(mask);
}

TEST(SimtCatches, WrongMasks) {
  auto run = [](unsigned mask, unsigned threads) {
    return failure_of([&] { launch("mask", mask_kernel, {.block = dim3(threads)}, mask); });
  };
  expect_has(run(0xfffffffeu, 32), {"leaves out the caller, lane 0"});
  expect_has(run(0xffffffffu, 20), {"its warp has only the lanes 0x000fffff"});
  EXPECT_EQ(run(0x000fffffu, 20), "");
}

__global__ void half_barrier_kernel(int* data) {
  if (threadIdx.x < 32) __syncthreads();
  data[threadIdx.x] = 1;
}

TEST(SimtCatches, BarriersReachedByPartOfTheBlock) {
  std::vector<int> data(64);
  expect_has(
      failure_of([&] { launch("half_barrier", half_barrier_kernel, {.block = dim3(64)}, data.data()); }),
      {"divergent barrier: 32 of 64 threads", "warp 0: lanes 0-31 wait at __syncthreads",
       "warp 1: lanes 0-31 exited"});
}

__global__ void two_barriers_kernel(int* data) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  data[threadIdx.x] = 1;
}

TEST(SimtCatches, ThreadsThatWaitAtDifferentBarriers) {
  std::vector<int> data(64);
  expect_has(
      failure_of([&] { launch("two_barriers", two_barriers_kernel, {.block = dim3(64)}, data.data()); }),
      {"divergent barrier", "different barriers"});
}

__global__ void deadlock_kernel(int* data) {
  if (threadIdx.x == 0) __syncthreads();
  __syncwarp();
  if (threadIdx.x != 0) __syncthreads();
  data[threadIdx.x] = 1;
}

TEST(SimtCatches, Deadlock) {
  std::vector<int> data(32);
  expect_has(failure_of([&] { launch("deadlock", deadlock_kernel, {.block = dim3(32)}, data.data()); }),
             {"lanes 0 wait at __syncthreads", "lanes 1-31 wait at __syncwarp"});
}

__global__ void grid_barrier_kernel(unsigned* arrived) {
  atomicAdd(arrived, 1u);
  while (atomicAdd(arrived, 0u) < gridDim.x) {
  }
}

TEST(SimtCatches, BlocksThatWaitForEachOther) {
  unsigned arrived = 0;
  expect_has(failure_of([&] {
               launch("grid_barrier", grid_barrier_kernel, {.grid = dim3(2), .block = dim3(1)}, &arrived);
             }),
             {"livelock"});
}

__global__ void written_kernel(int* data) {
  data[threadIdx.x] = 1;
}

TEST(SimtCatches, LaunchesThatCudaRejects) {
  int* none = nullptr;
  auto refusal = [&](cuda::LaunchConfig config) {
    return failure_of([&] { launch("refused", written_kernel, config, none); });
  };
  expect_has(refusal({.block = dim3(1025)}), {"refused", "1025 threads"});
  expect_has(refusal({.block = dim3(1, 1, 65)}), {"64 in z"});
  expect_has(refusal({.grid = dim3(1, 65536)}), {"grid"});
  expect_has(refusal({.grid = dim3(1), .block = dim3(1), .shared_bytes = 233 * 1024}), {"shared memory"});
}

__global__ void static_shared_kernel(int* out) {
  __shared__ int kept[32];
  kept[threadIdx.x] = 1;
  __syncthreads();
  if (threadIdx.x == 0) *out = kept[31];
}

// Checks that static and dynamic shared memory count together. The limit is 48 KB without permission and 227
// KB with permission.
TEST(SimtCatches, SharedMemorySizesThatCudaRejects) {
  int out = 0;
  const auto without_permission = [&](size_t bytes) {
    return failure_of([&] {
      simt::launch<int*>("static_shared", static_shared_kernel, dim3(1), dim3(32), bytes, nullptr, {&out});
    });
  };
  EXPECT_EQ(without_permission(48 * 1024 - 128), "");
  expect_has(without_permission(48 * 1024), {"refused", "128 of them static", "allow_dynamic_shared"});
  const auto with_permission = [&](size_t bytes) {
    return failure_of([&] {
      launch("static_shared", static_shared_kernel, {.block = dim3(32), .shared_bytes = bytes}, &out);
    });
  };
  EXPECT_EQ(with_permission(48 * 1024), "");
  EXPECT_EQ(with_permission(227 * 1024 - 128), "");
  expect_has(with_permission(227 * 1024), {"refused", "227 KB"});
}

TEST(Simt, ContinuesAfterAFailure) {
  std::vector<float> data(64);
  for (int i = 0; i < 3; ++i) {
    EXPECT_NE(failure_of([&] { launch("skip", skip_kernel, {.block = dim3(64)}, data.data(), 37); }), "");
    EXPECT_EQ(failure_of([&] { launch("skip", skip_kernel, {.block = dim3(64)}, data.data(), -1); }), "");
  }
}

// Memory errors end the process with AddressSanitizer's or UBSan's report, and with the kernel's name.

__global__ void read_kernel(const float* x, float* out, int at) {
  *out = x[at];
}

TEST(SimtDeathTest, ReadPastTheEndOfGlobalMemory) {
  std::vector<float> x(8), out(1);
  EXPECT_DEATH(launch("read", read_kernel, {.block = dim3(1)}, x.data(), out.data(), 8),
               "heap-buffer-overflow");
  EXPECT_DEATH(launch("read", read_kernel, {.block = dim3(1)}, x.data(), out.data(), 8),
               "in kernel 'read', block");
}

__global__ void shared_read_kernel(float* out, int at) {
  __shared__ float x[8];
  __shared__ float next[8];
  x[threadIdx.x] = next[threadIdx.x] = 0.0f;
  __syncwarp(0xffu);
  const float* behind = x;
  out[threadIdx.x] = behind[at];
}

TEST(SimtDeathTest, ReadPastTheEndOfStaticSharedMemory) {
  std::vector<float> out(8);
  EXPECT_DEATH(launch("shared_read", shared_read_kernel, {.block = dim3(8)}, out.data(), 9),
               "global-buffer-overflow|insufficient space");
  launch("shared_read", shared_read_kernel, {.block = dim3(8)}, out.data(), 7);
}

__global__ void dynamic_write_kernel(int at) {
  GW_DYNAMIC_SHARED(float, x);
  x[at] = 1.0f;
}

TEST(SimtDeathTest, WritePastTheEndOfDynamicSharedMemory) {
  launch("dynamic_write", dynamic_write_kernel, {.block = dim3(1), .shared_bytes = 36}, 8);
  EXPECT_DEATH(launch("dynamic_write", dynamic_write_kernel, {.block = dim3(1), .shared_bytes = 36}, 9),
               "heap-buffer-overflow");
}

__global__ void vector_read_kernel(const float* x, float* out) {
  *out = reinterpret_cast<const float4*>(x)->y;
}

TEST(SimtDeathTest, MisalignedVectorAccess) {
  std::vector<float> x(8), out(1);
  launch("vector_read", vector_read_kernel, {.block = dim3(1)}, x.data(), out.data());
  EXPECT_DEATH(launch("vector_read", vector_read_kernel, {.block = dim3(1)}, x.data() + 1, out.data()),
               "misaligned");
}

}  // namespace
}  // namespace gradwire::simt
