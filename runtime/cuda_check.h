// Turns CUDA and cuBLAS status codes into DeviceError with the call's text.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "runtime/error.h"

namespace gradwire::cuda {

inline void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) {
    throw DeviceError(std::string(call) + ": " + cudaGetErrorName(status) + ": " +
                      cudaGetErrorString(status));
  }
}

}  // namespace gradwire::cuda

#define GW_CUDA_CHECK(call) ::gradwire::cuda::check((call), #call)
