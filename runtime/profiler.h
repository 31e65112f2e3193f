// What a profiler that was started with a capture range (nsys --capture-range=cudaProfilerApi) takes down.
#pragma once

#include "runtime/device.h"

namespace gradwire {

// Of the whole process. Work that is enqueued or under way belongs to neither side for certain: synchronize
// before. CUDA devices only; throws DeviceError.
void profiler_start(Device device);
void profiler_stop(Device device);

}  // namespace gradwire
