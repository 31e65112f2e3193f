// The one place where kernels are launched: checked, on an explicit stream, with a grid that fits the device.
//
// Kernel sources also compile as plain C++ for tests/simt, which runs them block by block on the CPU. Only
// this file knows which of the two it is, so kernels obey a few rules:
//   - launched through gradwire::cuda::launch(), never with triple chevrons;
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

#include "runtime/cuda_check.h"
#endif

#include "runtime/device.h"
#include "runtime/error.h"

#ifndef GRADWIRE_SIMT
#define GW_DYNAMIC_SHARED(type, name)                         \
  extern __shared__ __align__(16) unsigned char name##_raw[]; \
  type* name = reinterpret_cast<type*>(name##_raw)
#endif

namespace gradwire::cuda {

struct LaunchConfig {
  dim3 grid{1};
  dim3 block{256};
  size_t shared_bytes = 0;
  CudaStream stream = nullptr;
};

// Throws DeviceError (tests/simt: simt::Failure) when the launch is refused. A grid with a zero
// dimension launches nothing.
template <typename... Params, typename... Args>
void launch(const char* name, void (*kernel)(Params...), const LaunchConfig& config, Args&&... args) {
  if (config.grid.x == 0 || config.grid.y == 0 || config.grid.z == 0) return;
#ifdef GRADWIRE_SIMT
  simt::launch<Params...>(name, kernel, config.grid, config.block, config.shared_bytes,
                          {static_cast<Params>(args)...});
#else
  if (config.shared_bytes > 48 * 1024) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(config.shared_bytes)),
          name);
  }
  // clang-format off
  kernel<<<config.grid, config.block, config.shared_bytes, config.stream>>>(static_cast<Params>(args)...);
  // clang-format on
  check(cudaGetLastError(), name);
#endif
}

// Streaming multiprocessors of the current device; asked once per device.
int multiprocessors();

// Blocks for a grid-stride loop over `items`: enough to fill the device, never more than the work needs.
inline unsigned grid_for(int64_t items, int64_t items_per_block, int blocks_per_multiprocessor = 8) {
  int64_t needed = (items + items_per_block - 1) / items_per_block;
  int64_t fill = static_cast<int64_t>(multiprocessors()) * blocks_per_multiprocessor;
  return static_cast<unsigned>(needed < fill ? needed : fill);
}

}  // namespace gradwire::cuda
