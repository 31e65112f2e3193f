// Streams and events of the host: an in-order queue with a thread, and marks in it.

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <list>
#include <mutex>
#include <new>

#include "runtime/device/device.h"
#include "runtime/device/device_impl.h"
#include "runtime/threads/thread.h"
#include "runtime/util/error.h"

namespace gradwire::host {
namespace {

// One recorded mark of a host event. The stream's thread completes the mark; any thread may wait for the
// mark.
struct Ticket {
  std::mutex mutex;
  std::condition_variable done_changed;
  bool done = false;
  std::exception_ptr error;  // the error of the recording stream, if the stream had failed
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

// The existing host streams.
struct HostStreams {
  std::mutex mutex;
  std::list<HostStream*> list;
};

// Never fails. The result is never destroyed, because streams may outlive static objects.
HostStreams& host_streams() {
  alignas(HostStreams) static std::byte memory[sizeof(HostStreams)];
  static HostStreams* const streams = new (memory) HostStreams;
  return *streams;
}

struct HostStream final : Stream::Impl {
  HostStream(std::string name, bool immediate, Stream::Priority priority = Stream::Priority::normal)
      : Impl(Device::host(), std::move(name), priority) {
    if (immediate) return;
    std::list<HostStream*> mine{this};
    thread = Thread(fmt::format("a thread of stream '{}'", this->name), [this] { work(); });
    std::lock_guard lock(host_streams().mutex);
    host_streams().list.splice(host_streams().list.end(), mine);  // cannot fail
  }
  ~HostStream() override {
    if (!thread.joinable()) return;
    {
      std::lock_guard lock(host_streams().mutex);
      host_streams().list.remove(this);
    }
    {
      std::lock_guard lock(mutex);
      stop = true;
      wake.notify_one();
    }
    if (thread.is_current()) {
      thread.detach();  // the last handle was dropped inside a task of this stream
    } else {
      thread.join();
    }
  }

  // A task of the stream. Tasks with `always` (event marks, waits) run even after a failure, so that no
  // thread deadlocks.
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
      throw DeviceError("a host stream cannot wait for an event of {}", event.device.name());
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

  // Blocks until the queue's current tasks are complete. Does not allocate, so that it also works after a
  // refused allocation.
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
            // Unlock before notifying: otherwise a thread that wakes up immediately blocks on the mutex.
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
  bool stop = false;  // ends the thread when the queue is empty
  std::condition_variable passed;
  bool busy = false;  // a task is running
  uint64_t finished = 0;
  static constexpr uint64_t kNever = UINT64_MAX;
  uint64_t wanted = kNever;    // the smallest number of finished tasks for which a thread waits
  std::exception_ptr failed;   // the value of `failure` after the last finished task
  std::exception_ptr failure;  // used by the stream's thread only (not by immediate streams, which throw)
  Thread thread;
};

void HostEvent::record(Stream::Impl& stream) {
  auto* host_stream = dynamic_cast<HostStream*>(&stream);
  if (host_stream == nullptr)
    throw DeviceError("a host event cannot be recorded on {}", stream.device.name());
  auto fresh = std::make_shared<Ticket>();
  host_stream->mark(fresh);
  ticket = std::move(fresh);
}

}  // namespace

std::shared_ptr<Stream::Impl> make_stream(std::string name, Stream::Priority priority) {
  return std::make_shared<HostStream>(std::move(name), false, priority);
}

std::shared_ptr<Stream::Impl> make_immediate_stream() {
  return std::make_shared<HostStream>("immediate", true);
}

std::shared_ptr<Event::Impl> make_event(bool timer) {
  return std::make_shared<HostEvent>(timer);
}

void release_in_order(std::shared_ptr<void> memory) noexcept {
  try {
    std::lock_guard lock(host_streams().mutex);
    for (HostStream* stream : host_streams().list) stream->push({[memory] {}, true});
  } catch (...) {  // not enough memory for the task: never frees `memory`, because a task may still use it
    alignas(std::shared_ptr<void>) std::byte never_destroyed[sizeof memory];
    new (never_destroyed) std::shared_ptr<void>(std::move(memory));
  }
}

}  // namespace gradwire::host
