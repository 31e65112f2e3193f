// Functions of the CUDA driver, which is found at run time: nothing is linked with it, so that programs start without one.
#pragma once

#include <cuda_runtime_api.h>

namespace gradwire::cuda {

// The driver's `name` as of a CUDA version (12000: 12.0), or null where the driver does not have it.
template <typename Function>
Function driver_function(const char* name, unsigned version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult query{};
  if (cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &query) == cudaSuccess &&
      query == cudaDriverEntryPointSuccess) {
    return reinterpret_cast<Function>(found);
  }
  cudaGetLastError();  // or the next check would report it
  return nullptr;
}

}  // namespace gradwire::cuda
