#include "runtime/device/graph.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "runtime/util/error.h"

namespace gradwire {
namespace {

thread_local Capture* capture_of_thread = nullptr;
std::atomic<uint64_t> captures{0};

}  // namespace

Capture* Capture::current() noexcept {
  return capture_of_thread;
}

void Capture::forbid(const char* what, const std::string& whose, const char* why) {
  if (capture_of_thread == nullptr) return;
  throw DeviceError("{}{} while a graph is captured on stream '{}': {}", what,
                    whose.empty() ? "" : fmt::format(" ({})", whose), capture_of_thread->origin_.name, why);
}

Capture::Capture(Stream::Impl& origin) : id_(++captures), origin_(origin) {
  forbid("Graph::capture", "", "one capture at a time");
  streams_[&origin][&origin] = 0;
  capture_of_thread = this;
}

Capture::~Capture() {
  capture_of_thread = nullptr;
}

Capture::Clock& Capture::joined(Stream::Impl& stream, const char* what) {
  auto found = streams_.find(&stream);
  if (found != streams_.end()) return found->second;
  throw DeviceError(
      "{} on stream '{}', which has not joined the graph captured on stream '{}': first let it "
      "wait for an event of that stream",
      what, stream.name, origin_.name);
}

void Capture::touch(Stream::Impl& stream) {
  ++joined(stream, "work")[&stream];
}

void Capture::submit(Stream::Impl& stream, std::function<void()> task) {
  touch(stream);
  operations.push_back({Operation::Kind::task, stream.shared_from_this(), {}, std::move(task)});
}

void Capture::record(Event::Impl& event, Stream::Impl& stream) {
  events_[&event] = joined(stream, "Event::record");
  event.capture = id_;
  if (stream.device.is_host()) {
    operations.push_back({Operation::Kind::record, stream.shared_from_this(), event.shared_from_this()});
  } else {
    event.record(stream);
  }
}

void Capture::wait(Stream::Impl& stream, const std::shared_ptr<Event::Impl>& event) {
  auto recorded = events_.find(event.get());
  if (event->timer || recorded == events_.end()) {
    throw DeviceError("Stream::wait on stream '{}' while a graph is captured on stream '{}': the event {}",
                      stream.name, origin_.name,
                      event->timer ? "is a timer" : "was not recorded in this capture");
  }
  for (const auto& [other, work] : recorded->second) {
    int64_t& known = streams_[&stream][other];
    known = std::max(known, work);
  }
  if (stream.device.is_host()) {
    operations.push_back({Operation::Kind::wait, stream.shared_from_this(), event});
  } else {
    stream.wait(*event);
  }
}

void Capture::finish() const {
  const Clock& seen = streams_.at(&origin_);
  for (const auto& [stream, clock] : streams_) {
    auto work = clock.find(stream);
    auto known = seen.find(stream);
    if (work == clock.end() || work->second == 0) continue;  // the stream joined but has no work
    if (known == seen.end() || known->second < work->second) {
      throw DeviceError(
          "the graph captured on stream '{}' ends before the work of stream '{}', for which it never waits",
          origin_.name, stream->name);
    }
  }
}

struct Graph::Impl {
  Impl() = default;
  Impl(const Impl&) = delete;
  // Waits for the host streams, which may still run tasks of the last launch, even after a failure.
  ~Impl() {
    const Stream::Impl* waited = nullptr;
    for (const Capture::Operation& operation : operations) {
      if (std::exchange(waited, operation.stream.get()) == operation.stream.get()) continue;
      try {
        operation.stream->synchronize();
      } catch (...) {  // the caller of launch() receives the error from the stream
      }
    }
  }
  std::shared_ptr<Stream::Impl> origin;
  std::vector<Capture::Operation> operations;  // the graph on the host
  std::shared_ptr<void> executable;            // the graph on CUDA
};

Graph Graph::capture(const Stream& origin, const std::function<void()>& enqueue) {
  Graph graph;
  graph.impl_ = std::make_shared<Impl>();
  graph.impl_->origin = origin.impl_;
  Capture capture(*origin.impl_);
  if (origin.device().is_host()) {
    enqueue();
    capture.finish();
    graph.impl_->operations = std::move(capture.operations);
    return graph;
  }
  const int device = origin.device().index;
  const CudaStream native = origin.impl_->native();
  cuda::begin_capture(device, native);
  try {
    enqueue();
    capture.finish();
  } catch (...) {
    cuda::drop_capture(device, native);
    throw;
  }
  graph.impl_->executable = cuda::end_capture(device, native);
  return graph;
}

void Graph::launch() const {
  const Impl& impl = *impl_;
  Capture::forbid("Graph::launch", "", "graphs do not nest");
  if (impl.executable)
    return cuda::launch_graph(impl.origin->device.index, impl.executable.get(), impl.origin->native());
  for (const Capture::Operation& operation : impl.operations) {
    switch (operation.kind) {
      case Capture::Operation::Kind::task:
        operation.stream->submit([task = &operation.task] { (*task)(); });
        break;
      case Capture::Operation::Kind::record:
        operation.event->record(*operation.stream);
        break;
      case Capture::Operation::Kind::wait:
        operation.stream->wait(*operation.event);
        break;
    }
  }
}

}  // namespace gradwire
