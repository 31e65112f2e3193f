// The memory that Buffers hold on each device.
#pragma once

#include <cstdint>

#include "runtime/device/device.h"

namespace gradwire {

struct MemoryUse {
  int64_t bytes = 0;  // now; without views of other memory
  int64_t peak = 0;   // the maximum since the process began, or since reset_memory_peak()
};

MemoryUse memory_use(Device device);
void reset_memory_peak(Device device);
// Called by Buffer for memory that it allocates; negative for memory that it releases.
void count_memory(Device device, int64_t bytes);

}  // namespace gradwire
