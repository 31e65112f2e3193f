// What kernels that wait for one another depend on: how many thread blocks a device runs beside each other, and whether
// launching a kernel can wait for those that run.
#pragma once

#include "runtime/device.h"

namespace gradwire {

// Streaming multiprocessors of a CUDA device: those of its part, of a GPU that is divided (MIG). 0: the host.
int multiprocessors(Device device);

// Whether CUDA loads a kernel when it is first launched, its default, and not with all others at the beginning
// (CUDA_MODULE_LOADING=EAGER). False without CUDA devices.
bool loads_kernels_lazily();

}  // namespace gradwire
