// How many thread blocks a device can run beside each other, for code that must not have more waiting for one another.
#pragma once

#include "runtime/device.h"

namespace gradwire {

// Streaming multiprocessors of a CUDA device: those of its part, of a GPU that is divided (MIG). 0: the host.
int multiprocessors(Device device);

}  // namespace gradwire
