// Properties of devices.
#pragma once

#include <cstddef>

#include "runtime/device/device.h"

namespace gradwire {

// Memory of a CUDA device, or of its partition (MIG), in bytes.
struct DeviceMemory {
  size_t free = 0, total = 0;
};
// Creates the device's context if the process has none.
DeviceMemory device_memory(Device device);

}  // namespace gradwire
