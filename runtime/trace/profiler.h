// Starts and stops a profiler that waits for a capture range (nsys --capture-range=cudaProfilerApi).
#pragma once

#include "runtime/device/device.h"

namespace gradwire {

// Starts or stops the recording of the whole process. Work in flight may or may not be recorded, so the
// caller should synchronize first. Throws DeviceError if `device` is the host.
void switch_profiler(Device device, bool on);

}  // namespace gradwire
