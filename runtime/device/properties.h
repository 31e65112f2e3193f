// Properties of devices and addresses, for choosing between transports and for kernels that wait for one
// another.
#pragma once

#include "runtime/device/device.h"

namespace gradwire {

// Returns the streaming multiprocessors of a CUDA device, or of its partition (MIG). 0 for the host.
int multiprocessors(Device device);

// Returns whether CUDA loads a kernel at its first launch, its default, instead of all at the start
// (CUDA_MODULE_LOADING=EAGER). Loading can wait for running kernels. False without CUDA devices.
bool loads_kernels_lazily();

// Returns whether a CUDA device reaches all visible peers whose memory it can access over NVLink, not PCIe.
// False for the host.
bool reaches_peers_over_nvlink(Device device);

// Returns whether `address`, which another library may have allocated, is in the memory of a CUDA device.
bool is_cuda_memory(const void* address);

}  // namespace gradwire
