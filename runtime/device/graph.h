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
#include <memory>

#include "runtime/device/device.h"

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

}  // namespace gradwire
