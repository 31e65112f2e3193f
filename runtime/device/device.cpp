// Device, Stream, Event, Buffer: the host implementation, and the dispatch to the CUDA one.
#include "runtime/device/device.h"

#include <fmt/core.h>
#include <sys/mman.h>

#include <array>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <list>
#include <mutex>
#include <new>
#include <thread>

#include "runtime/device/capture.h"
#include "runtime/device/device_impl.h"
#include "runtime/device/device_memory.h"
#include "runtime/device/memory_use.h"
#include "runtime/device/multiprocessors.h"
#include "runtime/device/op_count.h"
#include "runtime/device/short_slices.h"
#include "runtime/threads/float_mode.h"
#include "runtime/threads/resources.h"
#include "runtime/threads/thread.h"
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
#ifdef GRADWIRE_HAS_CUDA
  return cuda::device_count();
#else
  return 0;
#endif
}

bool can_access(Device from, Device to) {
  if (from == to) return true;
#ifdef GRADWIRE_HAS_CUDA
  if (from.is_cuda() && to.is_cuda()) return cuda::enable_peer_access(from.index, to.index);
#endif
  return false;
}

std::string cuda_unavailable_reason() {
#ifdef GRADWIRE_HAS_CUDA
  return cuda::unavailable_reason();
#else
  return "this build has no CUDA side (no nvcc when it was configured)";
#endif
}

std::vector<Device> available_devices() {
  std::vector<Device> devices{Device::host()};
  for (int i = 0; i < cuda_device_count(); ++i) devices.push_back(Device::cuda(i));
  return devices;
}

namespace {

#ifndef GRADWIRE_HAS_CUDA
[[noreturn]] void no_cuda(const char* what) {
  throw DeviceError(fmt::format("{}: no CUDA device: {}", what, cuda_unavailable_reason()));
}
#endif

// One recorded mark of a host event. The stream's thread completes it; any thread may wait for it.
struct Ticket {
  std::mutex mutex;
  std::condition_variable done_changed;
  bool done = false;
  std::exception_ptr error;  // of the recording stream, if it had failed
  std::chrono::steady_clock::time_point when;

  void complete(std::exception_ptr stream_error) {
    std::lock_guard lock(mutex);
    done = true;
    error = std::move(stream_error);
    when = std::chrono::steady_clock::now();
    done_changed.notify_all();
  }
  std::exception_ptr wait() {
    std::unique_lock lock(mutex);
    done_changed.wait(lock, [&] { return done; });
    return error;
  }
  bool wait_until(std::chrono::steady_clock::time_point deadline) {
    std::unique_lock lock(mutex);
    return done_changed.wait_until(lock, deadline, [&] { return done; });
  }
};

struct HostStream;

struct HostEvent final : Event::Impl {
  explicit HostEvent(bool timer) : Impl(Device::host(), timer) {}
  void record(Stream::Impl& stream) override;
  bool query() const override {
    if (!ticket) return true;
    std::lock_guard lock(ticket->mutex);
    return ticket->done;
  }
  void synchronize() const override {
    if (!ticket) return;
    if (auto error = ticket->wait()) std::rethrow_exception(error);
  }
  bool synchronize_until(std::chrono::steady_clock::time_point deadline) const override {
    if (ticket && !ticket->wait_until(deadline)) return false;
    synchronize();
    return true;
  }
  double ms_since(const Impl& start) const override {
    const auto& other = dynamic_cast<const HostEvent&>(start);
    if (!ticket || !other.ticket || !query() || !other.query()) {
      throw DeviceError("elapsed_ms: both events must be recorded and done");
    }
    return std::chrono::duration<double, std::milli>(ticket->when - other.ticket->when).count();
  }
  std::shared_ptr<Ticket> ticket;
};

// Owns memory that must never be freed, because a task may still use it.
class Abandoned {
 public:
  explicit Abandoned(std::shared_ptr<void> memory) {
    new (&memory_) std::shared_ptr<void>(std::move(memory));
  }

 private:
  alignas(std::shared_ptr<void>) std::byte memory_[sizeof(std::shared_ptr<void>)];
};

// The existing host streams.
class HostStreams {
 public:
  // Leaked on purpose: streams may outlive static objects.
  static HostStreams& all() {
    static HostStreams* streams = new HostStreams;
    return *streams;
  }
  // Takes the element of `one`, a list with one element. Never fails.
  void add(std::list<HostStream*>& one) {
    std::lock_guard lock(mutex_);
    streams_.splice(streams_.end(), one);
  }
  void remove(HostStream* stream) {
    std::lock_guard lock(mutex_);
    streams_.remove(stream);
  }
  // Releases `memory` once every stream has passed this point. Does not wait.
  void drop_in_order(std::shared_ptr<void> memory) noexcept;

 private:
  std::mutex mutex_;
  std::list<HostStream*> streams_;
};

struct HostStream final : Stream::Impl {
  HostStream(std::string name, bool immediate, Stream::Priority priority = Stream::Priority::normal)
      : Impl(Device::host(), std::move(name), priority) {
    if (immediate) return;
    std::list<HostStream*> mine{this};
    HostStreams& streams = HostStreams::all();  // may fail, so before the thread starts
    thread = Thread(fmt::format("a thread of stream '{}'", this->name), [this] { work(); });
    streams.add(mine);
  }
  ~HostStream() override {
    if (!thread.joinable()) return;
    HostStreams::all().remove(this);
    {
      std::lock_guard lock(mutex);
      stop = true;
      wake.notify_one();
    }
    if (thread.is_current()) {
      thread.detach();  // the last handle was dropped inside one of its own tasks
    } else {
      thread.join();
    }
  }

  // `always` tasks (event marks, waits) run even after a failure, so that no thread waits forever.
  struct Task {
    std::function<void()> run;
    bool always = false;
  };

  void submit(std::function<void()> task) override { push({std::move(task), false}); }

  void push(Task task) {
    if (!thread.joinable()) {  // immediate stream
      const DefaultFloatMode mode;
      task.run();
      return;
    }
    std::lock_guard lock(mutex);
    queue.push_back(std::move(task));
    wake.notify_one();
  }

  void wait(const Event::Impl& event) override {
    const auto* host_event = dynamic_cast<const HostEvent*>(&event);
    if (host_event == nullptr)
      throw DeviceError(fmt::format("a host stream cannot wait for an event of {}", event.device.name()));
    if (!host_event->ticket) return;
    if (!thread.joinable()) {
      host_event->synchronize();
      return;
    }
    push({[this, ticket = host_event->ticket] {
            if (auto error = ticket->wait(); error && !failure) failure = error;
          },
          true});
  }

  // Allocates nothing, so that it also works after a refused allocation.
  void synchronize() override {
    if (!thread.joinable()) return;
    std::unique_lock lock(mutex);
    const uint64_t all = finished + queue.size() + (busy ? 1 : 0);
    while (finished < all) {
      wanted = std::min(wanted, all);
      passed.wait(lock);
    }
    if (failed) std::rethrow_exception(failed);
  }

  void mark(const std::shared_ptr<Ticket>& ticket) {
    push({[this, ticket] { ticket->complete(failure); }, true});
  }

  CudaStream native() const override { throw DeviceError("a host stream has no CUDA handle"); }

  void work() {
    if (priority == Stream::Priority::high) ask_for_short_slices();
    const DefaultFloatMode mode;
    while (true) {
      Task task;
      {
        std::unique_lock lock(mutex);
        if (busy) {
          ++finished;
          failed = failure;
          busy = false;
          if (finished >= wanted) {
            wanted = kNever;
            // Unlocked: otherwise a thread that wakes up blocks on the mutex at once.
            lock.unlock();
            passed.notify_all();
            lock.lock();
          }
        }
        wake.wait(lock, [&] { return stop || !queue.empty(); });
        if (queue.empty()) return;
        task = std::move(queue.front());
        queue.pop_front();
        busy = true;
      }
      if (failure && !task.always) continue;
      try {
        task.run();
      } catch (...) {
        failure = std::current_exception();
      }
    }
  }

  std::mutex mutex;
  std::condition_variable wake;
  std::deque<Task> queue;
  bool stop = false;  // when the queue is empty
  std::condition_variable passed;
  bool busy = false;  // a task is running
  uint64_t finished = 0;
  static constexpr uint64_t kNever = UINT64_MAX;
  uint64_t wanted = kNever;    // the smallest number of finished tasks for which a thread waits
  std::exception_ptr failed;   // the value of `failure` after the last finished task
  std::exception_ptr failure;  // used by the stream's thread only (not by immediate streams, which throw)
  Thread thread;
};

void HostStreams::drop_in_order(std::shared_ptr<void> memory) noexcept {
  try {
    std::lock_guard lock(mutex_);
    for (HostStream* stream : streams_) stream->push({[memory] {}, true});
  } catch (...) {  // not enough memory for the task
    Abandoned never_freed(std::move(memory));
  }
}

void HostEvent::record(Stream::Impl& stream) {
  auto* host_stream = dynamic_cast<HostStream*>(&stream);
  if (host_stream == nullptr)
    throw DeviceError(fmt::format("a host event cannot be recorded on {}", stream.device.name()));
  auto fresh = std::make_shared<Ticket>();
  host_stream->mark(fresh);
  ticket = std::move(fresh);
}

}  // namespace

Stream Stream::create(Device device, std::string_view name, Priority priority) {
  if (device.is_host()) return Stream(std::make_shared<HostStream>(std::string(name), false, priority));
#ifdef GRADWIRE_HAS_CUDA
  return Stream(cuda::make_stream(device.index, std::string(name), priority));
#else
  no_cuda("Stream::create");
#endif
}

Stream Stream::adopt_cuda(int device_index, CudaStream native) {
#ifdef GRADWIRE_HAS_CUDA
  return Stream(cuda::adopt_stream(device_index, native));
#else
  (void)device_index, (void)native;
  no_cuda("Stream::adopt_cuda");
#endif
}

bool Stream::is_captured() const {
#ifdef GRADWIRE_HAS_CUDA
  return impl_->device.is_cuda() && cuda::is_captured(impl_->device.index, impl_->native());
#else
  return false;
#endif
}

Stream Stream::immediate_host() {
  return Stream(std::make_shared<HostStream>("immediate", true));
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
  if (device.is_host()) {
    event.impl_ = std::make_shared<HostEvent>(timer);
    return event;
  }
#ifdef GRADWIRE_HAS_CUDA
  event.impl_ = cuda::make_event(device.index, timer);
  return event;
#else
  no_cuda("Event::create");
#endif
}

// Throws if `event` marks a point inside a graph, which other streams cannot see.
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
// Polls: CUDA's driver has no wait with a deadline.
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

namespace {
// Large host buffers use huge pages where the system grants them: streaming is a third faster.
constexpr size_t kHugePage = size_t{2} << 20, kHugePageBytes = 4 * kHugePage;

std::shared_ptr<void> counted(std::shared_ptr<void> memory, Device device, size_t bytes) {
  const auto size = static_cast<int64_t>(bytes);
  void* const data = memory.get();
  count_memory(device, size);
  return {data, [memory = std::move(memory), device, size](void*) mutable {
            // Called when a constructor that has enqueued work on the memory fails. (cudaFree() itself
            // waits.)
            if (device.is_host() && std::uncaught_exceptions() > 0) {
              HostStreams::all().drop_in_order(std::move(memory));
            }
            memory.reset();
            count_memory(device, -size);
          }};
}
}  // namespace

Buffer::Buffer(Device device, size_t bytes) : device_(device), bytes_(bytes) {
  if (bytes == 0) return;
  Capture::forbid("Buffer", fmt::format("{} bytes", bytes), "memory is allocated in set-up");
  if (device.is_host()) {
    const size_t alignment = bytes >= kHugePageBytes ? kHugePage : 256;
    void* data = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (data == nullptr) throw_no_memory(bytes);
#ifdef MADV_HUGEPAGE
    if (bytes >= kHugePageBytes) madvise(data, bytes, MADV_HUGEPAGE);  // a hint; refusal costs only speed
#endif
    owner_ = counted(std::shared_ptr<void>(data, std::free), device, bytes);
  } else {
#ifdef GRADWIRE_HAS_CUDA
    owner_ = counted(cuda::allocate(device.index, bytes), device, bytes);
#else
    no_cuda("Buffer");
#endif
  }
  data_ = owner_.get();
}

Buffer Buffer::in_order(const Stream& stream, size_t bytes) {
  if (stream.device().is_host()) {
    Buffer buffer(stream.device(), bytes);
    if (!buffer) return buffer;
    buffer.owner_ = std::shared_ptr<void>(buffer.data_, [memory = buffer.owner_, stream](void*) mutable {
      stream.impl_->submit([memory = std::move(memory)] {});
    });
    return buffer;
  }
  Buffer buffer = view(stream.device(), nullptr, bytes);
  if (bytes == 0) return buffer;
  Capture::forbid("Buffer::in_order", fmt::format("{} bytes", bytes), "memory is allocated in set-up");
#ifdef GRADWIRE_HAS_CUDA
  buffer.owner_ = counted(cuda::allocate_in_order(stream.impl_, bytes), stream.device(), bytes);
#endif
  buffer.data_ = buffer.owner_.get();
  return buffer;
}

Buffer Buffer::view(Device device, void* data, size_t bytes, std::shared_ptr<void> owner) {
  Buffer buffer;
  buffer.device_ = device;
  buffer.data_ = data;
  buffer.bytes_ = bytes;
  buffer.owner_ = std::move(owner);
  return buffer;
}

Buffer Buffer::pinned([[maybe_unused]] Device device, size_t bytes) {
#ifdef GRADWIRE_HAS_CUDA
  if (bytes > 0 && device.is_cuda()) {
    cuda::set_device(device.index);  // otherwise the call makes a context on another GPU
    Buffer buffer;
    buffer.owner_ = cuda::allocate_pinned(bytes);
    buffer.data_ = buffer.owner_.get();
    buffer.bytes_ = bytes;
    return buffer;
  }
#endif
  return Buffer(Device::host(), bytes);
}

void copy(const Stream& stream, void* dst, const void* src, size_t bytes) {
  if (bytes == 0) return;
  OpCount::op("copy");
  if (stream.device().is_host()) {
    stream.submit([=] { std::memcpy(dst, src, bytes); });
    return;
  }
#ifdef GRADWIRE_HAS_CUDA
  detail::make_current(stream.device());
  cuda::copy(stream.native(), dst, src, bytes);
#endif
}

void fill_zero(const Stream& stream, void* dst, size_t bytes) {
  if (bytes == 0) return;
  OpCount::op("fill_zero");
  if (stream.device().is_host()) {
    stream.submit([=] { std::memset(dst, 0, bytes); });
    return;
  }
#ifdef GRADWIRE_HAS_CUDA
  detail::make_current(stream.device());
  cuda::fill_zero(stream.native(), dst, bytes);
#endif
}

void store(const Stream& stream, void* dst, const void* value, size_t bytes) {
  if (bytes == 0) return;
  OpCount::op("store");
  std::array<std::byte, 64> captured;
  Capture::forbid("store", "", "each launch would store the same value; call it in front of the launch");
  if (bytes > captured.size()) throw BadInput(fmt::format("store: {} bytes, at most 64 fit", bytes));
  std::memcpy(captured.data(), value, bytes);
  if (stream.device().is_host()) {
    stream.submit([=] { std::memcpy(dst, captured.data(), bytes); });
    return;
  }
#ifdef GRADWIRE_HAS_CUDA
  detail::make_current(stream.device());
  cuda::store(stream.native(), dst, captured.data(), bytes);
#endif
}

void increment(const Stream& stream, uint64_t* counter) {
  OpCount::op("increment");
  if (stream.device().is_host()) {
    stream.submit([=] { ++*counter; });
    return;
  }
#ifdef GRADWIRE_HAS_CUDA
  detail::make_current(stream.device());
  cuda::increment(stream.native(), counter);
#endif
}

void enable_peer_access(const std::vector<Device>& devices) {
#ifdef GRADWIRE_HAS_CUDA
  for (Device a : devices) {
    for (Device b : devices) {
      if (a.is_cuda() && b.is_cuda() && a != b) cuda::enable_peer_access(a.index, b.index);
    }
  }
#else
  (void)devices;
#endif
}

namespace detail {
void make_current(Device device) {
#ifdef GRADWIRE_HAS_CUDA
  if (device.is_cuda()) cuda::set_device(device.index);
#else
  (void)device;
#endif
}

namespace {
thread_local CallersDevice* callers_device = nullptr;  // the innermost of this thread
}  // namespace

CallersDevice::CallersDevice() : outer_(std::exchange(callers_device, this)) {}
CallersDevice::~CallersDevice() {
  callers_device = outer_;
#ifdef GRADWIRE_HAS_CUDA
  if (before_ >= 0) cuda::restore_device(before_);
#endif
}
void CallersDevice::will_change_to([[maybe_unused]] int index) {
#ifdef GRADWIRE_HAS_CUDA
  if (callers_device == nullptr || callers_device->before_ >= 0) return;
  if (const int now = cuda::current_device(); now != index) callers_device->before_ = now;
#endif
}
}  // namespace detail

bool reaches_peers_over_nvlink([[maybe_unused]] Device device) {
#ifdef GRADWIRE_HAS_CUDA
  return device.is_cuda() && cuda::reaches_peers_over_nvlink(device.index);
#else
  return false;
#endif
}

bool is_cuda_memory([[maybe_unused]] const void* address) {
#ifdef GRADWIRE_HAS_CUDA
  return cuda::is_device_memory(address);
#else
  return false;
#endif
}

int multiprocessors([[maybe_unused]] Device device) {
#ifdef GRADWIRE_HAS_CUDA
  if (device.is_cuda()) {
    cuda::set_device(device.index);
    return cuda::multiprocessors();
  }
#endif
  return 0;
}

bool loads_kernels_lazily() {
#ifdef GRADWIRE_HAS_CUDA
  return cuda::device_count() > 0 && cuda::loads_kernels_lazily();
#else
  return false;
#endif
}

}  // namespace gradwire
