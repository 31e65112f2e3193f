// Turns CUDA and cuBLAS status codes into exceptions with the call's text: OutOfResources if memory is
// refused, otherwise DeviceError.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "runtime/device/device.h"
#include "runtime/threads/thread.h"
#include "runtime/util/error.h"

namespace gradwire::cuda {

inline void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  const std::string text =
      std::string(call) + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status);
  cudaGetLastError();  // clear the sticky error: the next launch check would report it again
  if (status == cudaErrorMemoryAllocation) throw OutOfResources(text);
  throw DeviceError(text);
}

// Ignores a failure in a destructor, where it cannot be handled. Clears the error, so that the next launch
// does not report the failure.
inline void ignore(cudaError_t status) {
  if (status != cudaSuccess) cudaGetLastError();
}

}  // namespace gradwire::cuda

#define GW_CUDA_CHECK(call) ::gradwire::cuda::check((call), #call)

namespace gradwire::cuda {

// Functions of the CUDA driver, found at run time. No binary is linked with the driver, so programs start
// without a driver.

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
