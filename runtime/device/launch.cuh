// The only place that launches kernels. Launches are checked and use an explicit stream and a grid that fits
// the device.
//
// Kernel sources also compile as plain C++: for tests/simt, which runs them block by block on the CPU, and
// for tests/standin, which runs kernels in the order of streams. Only this file depends on the target, so
// kernels obey a few rules:
//   - launched through gradwire::cuda::launch(), never with triple chevrons;
//   - its first statement is wait_for_earlier_kernels();
//   - dynamic shared memory is declared with GW_DYNAMIC_SHARED(type, name);
//   - static shared memory is declared as `__shared__ T name[N];` with T trivially constructible;
//   - warp primitives are the _sync ones;
//   - no inline PTX without a plain branch under GRADWIRE_SIMT.
#pragma once

#include <cstdint>

#ifdef GRADWIRE_SIMT
#include "tests/simt/simt.h"
#else
#include <cuda_runtime.h>

#include "runtime/device/device_cuda.h"
#endif

#include "runtime/device/device.h"
#include "runtime/util/error.h"

#ifndef GRADWIRE_SIMT
#define GW_DYNAMIC_SHARED(type, name)                         \
  extern __shared__ __align__(16) unsigned char name##_raw[]; \
  type* name = reinterpret_cast<type*>(name##_raw)
#endif

namespace gradwire::cuda {

// Waits until the kernels before this one on the stream have ended, and what they wrote is visible. A launch
// with GRADWIRE_EARLY_LAUNCH=1 starts a kernel earlier, so that its blocks are ready when the wait ends.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Returns whether launches of `kernel` may start early: GRADWIRE_EARLY_LAUNCH is 1, and the kernel's code for
// the current device waits.
bool launches_early(const void* kernel);

struct LaunchConfig {
  dim3 grid{1};
  dim3 block{256};
  size_t shared_bytes = 0;
  CudaStream stream = nullptr;
};

// Raises the limit of `kernel`'s dynamic shared memory on the current device to the given size. Otherwise a
// GPU rejects a launch whose static and dynamic parts exceed 48 KB together. Calls the driver only when the
// size grows.
void allow_dynamic_shared(const char* name, const void* kernel, size_t bytes);

// Launches a kernel. A grid with a zero dimension launches nothing. Throws DeviceError (tests/simt:
// simt::Failure) when the launch is rejected.
template <typename... Params, typename... Args>
void launch(const char* name, void (*kernel)(Params...), const LaunchConfig& config, Args&&... args) {
  if (config.grid.x == 0 || config.grid.y == 0 || config.grid.z == 0) return;
  OpCount::launch(name);
  if (config.shared_bytes > 0)
    allow_dynamic_shared(name, reinterpret_cast<const void*>(kernel), config.shared_bytes);
#ifdef GRADWIRE_SIMT
  simt::launch<Params...>(name, kernel, config.grid, config.block, config.shared_bytes, config.stream,
                          {static_cast<Params>(args)...});
#else
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launched{config.grid, config.block, config.shared_bytes, config.stream, &early, 0};
  if (launches_early(reinterpret_cast<const void*>(kernel))) launched.numAttrs = 1;
  check(cudaLaunchKernelEx(&launched, kernel, static_cast<Params>(args)...), name);
#endif
}

// Returns the number of streaming multiprocessors of the current device; queried once per device.
int multiprocessors();

// Returns the largest shared memory, in bytes, that a block may request on the current device; queried once
// per device.
size_t max_shared_bytes();

// Returns the number of blocks of `kernel` that are resident on a multiprocessor of the current device,
// limited by registers, shared memory and threads. Queried once per kernel, block size and device.
int resident_blocks(const void* kernel, int threads, size_t shared_bytes);

// Returns the number of blocks that are resident on the current device at once; further blocks wait until
// resident blocks end.
template <typename... Params>
int64_t device_blocks(void (*kernel)(Params...), int threads, size_t shared_bytes = 0) {
  return int64_t{multiprocessors()} *
         resident_blocks(reinterpret_cast<const void*>(kernel), threads, shared_bytes);
}

// Returns the number of blocks for a grid-stride loop over `items`: the blocks that are resident on the
// device at once, but at most as many as the work needs.
template <typename... Params>
unsigned grid_for(void (*kernel)(Params...), int64_t items, int64_t items_per_block, int threads,
                  size_t shared_bytes = 0) {
  const int64_t needed = (items + items_per_block - 1) / items_per_block;
  const int64_t fill = device_blocks(kernel, threads, shared_bytes);
  return static_cast<unsigned>(needed < fill ? needed : fill);
}

}  // namespace gradwire::cuda
