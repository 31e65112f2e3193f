// Starts and stops a profiler that was run with a capture range (nsys --capture-range=cudaProfilerApi).
#pragma once

#include "runtime/device/device.h"

namespace gradwire {

// For the whole process. Work in flight may or may not be recorded, so synchronize first. CUDA devices only;
// throws DeviceError.
void profiler_start(Device device);
void profiler_stop(Device device);

}  // namespace gradwire
