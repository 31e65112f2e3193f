// How much memory Buffers hold on each device.
#pragma once

#include <cstdint>

#include "runtime/device.h"

namespace gradwire {

struct MemoryUse {
  int64_t bytes = 0;  // now; views of other memory don't count
  int64_t peak = 0;   // the most since the process began, or since reset_memory_peak()
};

MemoryUse memory_use(Device device);
void reset_memory_peak(Device device);
// By Buffer, for memory that it has got; negative for what it gives back.
void count_memory(Device device, int64_t bytes);

}  // namespace gradwire
