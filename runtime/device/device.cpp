// Device, Stream and Event: the dispatch to the host's implementation or to CUDA's.
#include "runtime/device/device.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <thread>
#include <utility>

#include "runtime/device/device_impl.h"
#include "runtime/device/graph.h"
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

void enable_access(Device from, Device to) {
  if (from != to && from.is_cuda() && to.is_cuda()) cuda::enable_peer_access(from.index, to.index);
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
  throw DeviceError("{}: the event was last recorded inside a graph; record it outside, or make it a timer",
                    what);
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

namespace {

thread_local OpCount* current = nullptr;

}  // namespace

OpCount::OpCount() : outer_(current) {
  current = this;
}
OpCount::~OpCount() {
  current = outer_;
}

void OpCount::op(const char* name) {
  for (OpCount* count = current; count != nullptr; count = count->outer_) ++count->ops_[name];
}
void OpCount::launch(const char* name) {
  for (OpCount* count = current; count != nullptr; count = count->outer_) ++count->launches_[name];
}

int64_t OpCount::total(const ByName& counts) {
  int64_t sum = 0;
  for (const auto& [name, count] : counts) sum += count;
  return sum;
}

namespace {

struct Count {
  std::atomic<int64_t> bytes{0}, peak{0};
};

Count& count_of(Device device) {
  constexpr size_t kDevices = 64;  // devices with separate counters; further devices share the last counter
  static std::array<Count, 1 + kDevices> counts;
  return counts[device.is_host() ? 0 : 1 + std::min(static_cast<size_t>(device.index), kDevices - 1)];
}

}  // namespace

MemoryUse memory_use(Device device) {
  const Count& count = count_of(device);
  return {count.bytes, count.peak};
}

void reset_memory_peak(Device device) {
  Count& count = count_of(device);
  count.peak = count.bytes.load();
}

void count_memory(Device device, int64_t bytes) {
  Count& count = count_of(device);
  const int64_t now = count.bytes += bytes;
  int64_t peak = count.peak;
  while (now > peak && !count.peak.compare_exchange_weak(peak, now)) {
  }
}

namespace {

// The kernel's struct sched_attr, first version; glibc defines it since version 2.41.
struct Scheduling {
  uint32_t size = 0, policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t slice_ns = 0, deadline_ns = 0, period_ns = 0;
};

}  // namespace

void ask_for_short_slices() {
  Scheduling scheduling;
  if (syscall(SYS_sched_getattr, 0, &scheduling, sizeof scheduling, 0) != 0) return;
  if (scheduling.policy != SCHED_OTHER) return;  // the user has chosen another policy
  scheduling.slice_ns = 100'000;
  syscall(SYS_sched_setattr, 0, &scheduling, 0);
}

}  // namespace gradwire
