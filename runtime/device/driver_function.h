// Functions of the CUDA driver, found at run time. No binary is linked with the driver, so programs start
// without a driver.
#pragma once

#include <cuda_runtime_api.h>

namespace gradwire::cuda {

// Returns the driver's function `name` as of a CUDA version (12000: 12.0), or null if the driver lacks it.
template <typename Function>
Function driver_function(const char* name, unsigned version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult query{};
  if (cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &query) == cudaSuccess &&
      query == cudaDriverEntryPointSuccess) {
    return reinterpret_cast<Function>(found);
  }
  cudaGetLastError();  // clear the sticky error
  return nullptr;
}

}  // namespace gradwire::cuda
