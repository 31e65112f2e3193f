// Device properties for kernels that wait for one another: how many thread blocks run concurrently, and
// whether a launch can wait for running kernels.
#pragma once

#include "runtime/device/device.h"

namespace gradwire {

// Returns the streaming multiprocessors of a CUDA device, or of its partition (MIG). 0 for the host.
int multiprocessors(Device device);

// Returns whether CUDA loads a kernel at its first launch, its default, instead of all at the start
// (CUDA_MODULE_LOADING=EAGER). False without CUDA devices.
bool loads_kernels_lazily();

}  // namespace gradwire
