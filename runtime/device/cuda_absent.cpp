// The CUDA side of a build without CUDA: the number of devices is 0, and all calls for a device throw
// DeviceError.
#ifndef GRADWIRE_HAS_CUDA

#include "runtime/device/device_impl.h"
#include "runtime/util/error.h"

namespace gradwire::cuda {
namespace {

[[noreturn]] void absent(const char* what) {
  throw DeviceError("{}: {}", what, unavailable_reason());
}

}  // namespace

int device_count() {
  return 0;
}
std::string unavailable_reason() {
  return "this build has no CUDA side; where nvcc is installed, make build adds it";
}
void drop_capture(int, CudaStream) noexcept {}
void restore_device(int) noexcept {}

// Functions marked weak are replaced by definitions in tests/simt, which runs the kernels on the host.
#define GW_ABSENT(result, function, ...) \
  result function(__VA_ARGS__) {         \
    absent(#function);                   \
  }

GW_ABSENT(std::shared_ptr<Stream::Impl>, make_stream, int, std::string, Stream::Priority)
GW_ABSENT(std::shared_ptr<Stream::Impl>, adopt_stream, int, CudaStream)
GW_ABSENT(std::shared_ptr<Event::Impl>, make_event, int, bool)
GW_ABSENT(void, begin_capture, int, CudaStream)
GW_ABSENT(std::shared_ptr<void>, end_capture, int, CudaStream)
GW_ABSENT(bool, is_captured, int, CudaStream)
GW_ABSENT(void, launch_graph, int, void*, CudaStream)
GW_ABSENT(std::shared_ptr<void>, allocate, int, size_t)
GW_ABSENT(std::shared_ptr<void>, allocate_pinned, size_t)
GW_ABSENT(std::shared_ptr<void>, allocate_in_order, const std::shared_ptr<Stream::Impl>&, size_t)
GW_ABSENT(void, enable_peer_access, int, int)
GW_ABSENT(void, copy, CudaStream, void*, const void*, size_t)
GW_ABSENT(void, fill_zero, CudaStream, void*, size_t)
GW_ABSENT([[gnu::weak]] void, store, CudaStream, void*, const void*, size_t)
GW_ABSENT([[gnu::weak]] void, increment, CudaStream, uint64_t*)
GW_ABSENT(void, set_device, int)
GW_ABSENT(int, current_device, void)
GW_ABSENT([[gnu::weak]] int, multiprocessors, void)
GW_ABSENT(DeviceMemory, device_memory, int)
GW_ABSENT(void, switch_profiler, int, bool)

}  // namespace gradwire::cuda
#endif
