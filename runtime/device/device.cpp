// Device, Stream and Event: the dispatch to the host's implementation or to CUDA's.
#include "runtime/device/device.h"

#include <fmt/core.h>

#include <thread>
#include <utility>

#include "runtime/device/capture.h"
#include "runtime/device/device_impl.h"
#include "runtime/device/properties.h"
#include "runtime/util/error.h"

namespace gradwire {

std::string Device::name() const {
  return is_host() ? "host" : fmt::format("cuda:{}", index);
}

bool built_with_cuda() {
#ifdef GRADWIRE_HAS_CUDA
  return true;
#else
  return false;
#endif
}

int cuda_device_count() {
  return cuda::device_count();
}

std::string cuda_unavailable_reason() {
  return cuda::unavailable_reason();
}

std::vector<Device> available_devices() {
  std::vector<Device> devices{Device::host()};
  for (int i = 0; i < cuda_device_count(); ++i) devices.push_back(Device::cuda(i));
  return devices;
}

bool enable_access(Device from, Device to) {
  if (from == to) return true;
  return from.is_cuda() && to.is_cuda() && cuda::enable_peer_access(from.index, to.index);
}

DeviceMemory device_memory(Device device) {
  if (device.is_host()) throw Error("device_memory: the device is the host");
  return cuda::device_memory(device.index);
}

Stream Stream::create(Device device, std::string_view name, Priority priority) {
  return Stream(device.is_host() ? host::make_stream(std::string(name), priority)
                                 : cuda::make_stream(device.index, std::string(name), priority));
}

Stream Stream::adopt_cuda(int device_index, CudaStream native) {
  return Stream(cuda::adopt_stream(device_index, native));
}

Stream Stream::immediate_host() {
  return Stream(host::make_immediate_stream());
}

bool Stream::is_captured() const {
  return impl_->device.is_cuda() && cuda::is_captured(impl_->device.index, impl_->native());
}

Device Stream::device() const {
  return impl_->device;
}
const std::string& Stream::name() const {
  return impl_->name;
}
Stream::Priority Stream::priority() const {
  return impl_->priority;
}
void Stream::submit(std::function<void()> task) const {
  if (Capture* capture = Capture::current()) return capture->submit(*impl_, std::move(task));
  impl_->submit(std::move(task));
}
void Stream::synchronize() const {
  Capture::forbid("Stream::synchronize", name(), "the host would wait for work that has not begun");
  impl_->synchronize();
}
CudaStream Stream::native() const {
  if (Capture* capture = Capture::current(); capture && device().is_cuda()) capture->touch(*impl_);
  return impl_->native();
}
void Stream::wait(const Event& event) const {
  if (Capture* capture = Capture::current()) return capture->wait(*impl_, event.impl_);
  Event::outside(*event.impl_, "Stream::wait");
  impl_->wait(*event.impl_);
}

Event Event::make(Device device, bool timer) {
  Event event;
  event.impl_ = device.is_host() ? host::make_event(timer) : cuda::make_event(device.index, timer);
  return event;
}

// Throws if `event` marks a point inside a graph, which streams outside the graph cannot wait for.
void Event::outside(const Impl& event, const char* what) {
  if (event.capture == 0 || event.timer) return;
  throw DeviceError(fmt::format(
      "{}: the event was last recorded inside a graph; record it outside, or make it a timer", what));
}

Event Event::create(Device device) {
  return make(device, false);
}
Event Event::create_timer(Device device) {
  return make(device, true);
}
void Event::record(const Stream& stream) {
  if (Capture* capture = Capture::current()) return capture->record(*impl_, *stream.impl_);
  impl_->capture = 0;
  impl_->record(*stream.impl_);
}
bool Event::query() const {
  Capture::forbid("Event::query", "", "what the host does then would not be done again");
  outside(*impl_, "Event::query");
  return impl_->query();
}
void Event::synchronize() const {
  Capture::forbid("Event::synchronize", "", "the host would wait for work that has not begun");
  outside(*impl_, "Event::synchronize");
  impl_->synchronize();
}
// Polls the event until the deadline, because CUDA's driver has no wait with a deadline.
bool Event::Impl::synchronize_until(std::chrono::steady_clock::time_point deadline) const {
  while (!query()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  synchronize();
  return true;
}
bool Event::synchronize_until(std::chrono::steady_clock::time_point deadline) const {
  Capture::forbid("Event::synchronize_until", "", "the host would wait for work that has not begun");
  outside(*impl_, "Event::synchronize_until");
  return impl_->synchronize_until(deadline);
}
double elapsed_ms(const Event& start, const Event& end) {
  if (!start.impl_->timer || !end.impl_->timer) {
    throw DeviceError("elapsed_ms: an event has no time; create both with Event::create_timer");
  }
  Event::outside(*start.impl_, "elapsed_ms");
  Event::outside(*end.impl_, "elapsed_ms");
  return end.impl_->ms_since(*start.impl_);
}

namespace detail {
void make_current(Device device) {
  if (device.is_cuda()) cuda::set_device(device.index);
}

namespace {
thread_local CallersDevice* callers_device = nullptr;  // the innermost object of this thread
}  // namespace

CallersDevice::CallersDevice() : outer_(std::exchange(callers_device, this)) {}
CallersDevice::~CallersDevice() {
  callers_device = outer_;
  if (before_ >= 0) cuda::restore_device(before_);
}
void CallersDevice::will_change_to(int index) {
  if (callers_device == nullptr || callers_device->before_ >= 0) return;
  if (const int now = cuda::current_device(); now != index) callers_device->before_ = now;
}
}  // namespace detail

}  // namespace gradwire
