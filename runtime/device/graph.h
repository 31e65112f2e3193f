// Graph: work that is enqueued once and launched many times, in the same order on the same addresses.
//
// On CUDA it is a CUDA graph: Stream and Event calls of the capturing thread become nodes and edges. On the
// host it is the list of those calls, and a launch repeats them. That is not faster, but shows that the graph
// contains no decision of the host. Both reject, with an error:
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
  Graph() = default;  // empty; must not be launched

  // Calls `enqueue`, which puts work on `origin` and on streams that join it, and records that work instead
  // of starting it. Throws what `enqueue` throws; DeviceError names work that cannot be captured.
  static Graph capture(const Stream& origin, const std::function<void()>& enqueue);

  // Enqueues the work on the stream of the capture: after earlier work there, before later work. The memory
  // that it uses must still exist, and on CUDA its other streams. Dropping the last handle of a graph on the
  // host waits until its launches are complete.
  void launch() const;
  explicit operator bool() const { return impl_ != nullptr; }

  struct Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace gradwire
