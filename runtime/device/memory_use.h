// The memory that Buffers hold on each device.
#pragma once

#include <cstdint>

#include "runtime/device/device.h"

namespace gradwire {

struct MemoryUse {
  int64_t bytes = 0;  // allocated now, without views of other memory
  int64_t peak = 0;   // the maximum since the process began, or since reset_memory_peak()
};

MemoryUse memory_use(Device device);
void reset_memory_peak(Device device);
// Counts memory that a Buffer allocates; `bytes` is negative for memory that a Buffer releases.
void count_memory(Device device, int64_t bytes);

}  // namespace gradwire
