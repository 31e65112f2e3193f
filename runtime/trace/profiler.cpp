#include "runtime/trace/profiler.h"

#include <fmt/core.h>

#include "runtime/device/device_impl.h"
#include "runtime/util/error.h"

namespace gradwire {

void switch_profiler(Device device, bool on) {
  if (!device.is_cuda())
    throw DeviceError(fmt::format("a profiler range needs a CUDA device; {} is none", device.name()));
  cuda::switch_profiler(device.index, on);
}

}  // namespace gradwire
