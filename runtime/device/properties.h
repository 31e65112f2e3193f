// Properties of devices and addresses, for choosing between transports and for kernels that wait for one
// another.
#pragma once

#include <cstddef>

#include "runtime/device/device.h"

namespace gradwire {

// Returns the number of streaming multiprocessors of a CUDA device, or of its partition (MIG). 0 for the
// host.
int multiprocessors(Device device);

// Memory of a CUDA device, or of its partition (MIG), in bytes.
struct DeviceMemory {
  size_t free = 0, total = 0;
};
// Creates the device's context if the process has none.
DeviceMemory device_memory(Device device);

// Returns whether CUDA loads each kernel at the kernel's first launch (the default), instead of all kernels
// at the start (CUDA_MODULE_LOADING=EAGER). Loading can wait for running kernels. False without CUDA devices.
bool loads_kernels_lazily();

// Returns whether a CUDA device accesses peers over NVLink, not PCIe: true if this holds for all visible
// peers whose memory it can access. False for the host.
bool reaches_peers_over_nvlink(Device device);

// Returns whether `address`, which another library may have allocated, is in the memory of a CUDA device.
bool is_cuda_memory(const void* address);

}  // namespace gradwire
