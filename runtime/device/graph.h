// Graph: work that is enqueued once and launched many times, in the same order on the same addresses.
//
// On CUDA it is a CUDA graph: Stream and Event calls of the capturing thread become nodes and edges. On the
// host it is the list of these calls, and a launch repeats the calls. A host graph is not faster, but tests
// that the graph does not depend on decisions of the host. A capture on either device rejects, with an error:
//   - waiting on the host (synchronize, query), and memory allocated during the capture;
//   - store(), whose value would be the same at each launch: call it before launch();
//   - work on a stream that has not joined (by waiting for an event of a stream that has), or for which the
//     stream of the capture does not wait in the end, directly or indirectly;
//   - waiting for an event that was recorded outside, or for a timer; a stream outside waiting for an event
//     inside.
// Kernels must be loaded and library handles must exist: first enqueue the same work once without a capture.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/device/device.h"
#include "runtime/device/device_impl.h"

namespace gradwire {

class Graph {
 public:
  Graph() = default;  // an empty handle, which must not be launched

  // Calls `enqueue`, which enqueues work on `origin` and on streams that join the capture. Records this work
  // without starting it. Throws the exceptions of `enqueue`, and DeviceError for work that cannot be
  // captured.
  static Graph capture(const Stream& origin, const std::function<void()>& enqueue);

  // Enqueues the work on the stream of the capture, after the stream's earlier work and before its later
  // work. The memory that the work uses must still exist; on CUDA, so must the graph's other streams.
  // Dropping the last handle of a graph on the host waits until its launches are complete.
  void launch() const;
  explicit operator bool() const { return impl_ != nullptr; }

  struct Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

// The reports of Stream, Event and Buffer to the graph that the calling thread is capturing: the internals of
// graph.h.

class Capture {
 public:
  // Returns this thread's capture, or null.
  static Capture* current() noexcept;
  // Throws if this thread is capturing a graph. The error says that `what` cannot be in a graph, because
  // `why`.
  static void forbid(const char* what, const std::string& whose, const char* why);

  explicit Capture(Stream::Impl& origin);
  ~Capture();
  Capture(const Capture&) = delete;

  // Records that work is about to be enqueued on `stream`, which must have joined the capture.
  void touch(Stream::Impl& stream);
  void submit(Stream::Impl& stream, std::function<void()> task);  // host streams only
  void record(Event::Impl& event, Stream::Impl& stream);
  void wait(Stream::Impl& stream, const std::shared_ptr<Event::Impl>& event);
  // Throws unless the origin has waited for all other streams.
  void finish() const;

  // On the host: one call that each launch repeats.
  struct Operation {
    enum class Kind : uint8_t { task, record, wait } kind;
    std::shared_ptr<Stream::Impl> stream;
    std::shared_ptr<Event::Impl> event = {};
    std::function<void()> task = {};
  };
  std::vector<Operation> operations;

 private:
  // The amount of each stream's work that is complete at a point.
  using Clock = std::map<const Stream::Impl*, int64_t>;
  Clock& joined(Stream::Impl& stream, const char* what);

  const uint64_t id_;
  Stream::Impl& origin_;
  std::map<const Stream::Impl*, Clock> streams_;
  std::map<const Event::Impl*, Clock> events_;
};

}  // namespace gradwire
