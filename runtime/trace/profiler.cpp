#include "runtime/trace/profiler.h"

#include <fmt/core.h>

#include "runtime/util/error.h"
#ifdef GRADWIRE_HAS_CUDA
#include <cuda_profiler_api.h>

#include "runtime/device/cuda_check.h"
#include "runtime/device/device.h"
#endif

namespace gradwire {
namespace {

void switch_profiler([[maybe_unused]] Device device, [[maybe_unused]] bool on) {
#ifdef GRADWIRE_HAS_CUDA
  if (device.is_cuda()) {
    detail::make_current(device);
    GW_CUDA_CHECK(on ? cudaProfilerStart() : cudaProfilerStop());
    return;
  }
#endif
  throw DeviceError(fmt::format("the profiler range is CUDA's; {} has none", device.name()));
}

}  // namespace

void profiler_start(Device device) {
  switch_profiler(device, true);
}
void profiler_stop(Device device) {
  switch_profiler(device, false);
}

}  // namespace gradwire
