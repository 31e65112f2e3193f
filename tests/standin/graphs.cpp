// Stream capture and graphs. Implements the rules in the CUDA programming guide's section on CUDA graphs,
// "stream capture".
#include <algorithm>
#include <random>
#include <set>

#include "tests/standin/machine.h"

namespace gradwire::standin {
namespace {

thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

bool contains(const Capture& capture, const CUstream_st* stream) {
  return std::ranges::find(capture.streams, stream) != capture.streams.end();
}

void join(const std::shared_ptr<Capture>& capture, CUstream_st& stream) {
  if (contains(*capture, &stream)) return;
  capture->streams.push_back(&stream);
  stream.capture = capture;
  stream.tail.clear();
}

cudaError_t invalidate(Capture& capture, cudaError_t error) {
  capture.invalid = true;
  return error;
}

// Returns the nodes in `last` and all their predecessors.
std::set<const Node*> with_predecessors(const std::vector<const Node*>& last) {
  std::set<const Node*> seen;
  std::vector<const Node*> next = last;
  while (!next.empty()) {
    const Node* const node = next.back();
    next.pop_back();
    if (seen.insert(node).second) next.insert(next.end(), node->after.begin(), node->after.end());
  }
  return seen;
}

void end(const std::shared_ptr<Capture>& capture) {
  for (CUstream_st* stream : capture->streams) {
    stream->capture = nullptr;
    stream->tail.clear();
  }
  std::erase(machine().captures, capture);
}

// Returns the nodes in a random order in which each node follows its predecessors. `seed` selects the order.
std::vector<const Node*> in_some_order(const std::vector<std::shared_ptr<Node>>& nodes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<const Node*> ordered;
  std::set<const Node*> done;
  while (ordered.size() < nodes.size()) {
    std::vector<const Node*> candidates;
    for (const auto& node : nodes) {
      if (!done.contains(node.get()) &&
          std::ranges::all_of(node->after, [&](const Node* before) { return done.contains(before); }))
        candidates.push_back(node.get());
    }
    const Node* const chosen = candidates[random() % candidates.size()];
    ordered.push_back(chosen);
    done.insert(chosen);
  }
  return ordered;
}

}  // namespace

cudaError_t forbid_while_capturing() {
  if (mode_of_thread == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (const auto& capture : machine().captures) {
    const bool own = capture->thread == std::this_thread::get_id();
    if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
    if (own ||
        (capture->mode == cudaStreamCaptureModeGlobal && mode_of_thread == cudaStreamCaptureModeGlobal))
      return invalidate(*capture, cudaErrorStreamCaptureUnsupported);
  }
  return cudaSuccess;
}

cudaError_t record_in_capture(CUstream_st& stream, Op op) {
  Capture& capture = *stream.capture;
  if (capture.invalid) return cudaErrorStreamCaptureInvalidated;
  op.devices |= reachable_from(stream.device);
  auto node = std::make_shared<Node>(Node{std::move(op), stream.tail});
  stream.tail = {node.get()};
  capture.nodes.push_back(std::move(node));
  return cudaSuccess;
}

cudaError_t record_event_in_capture(CUstream_st& stream, const std::shared_ptr<EventState>& event,
                                    bool external) {
  if (stream.capture->invalid) return cudaErrorStreamCaptureInvalidated;
  if (external) {
    event->capture = nullptr;
    return record_in_capture(stream, {.kind = Op::Kind::record, .name = "an event", .event = event});
  }
  event->capture = stream.capture;
  event->captured = stream.tail;
  return cudaSuccess;
}

cudaError_t wait_in_capture(CUstream_st& stream, EventState& event) {
  if (event.capture == nullptr) {
    // The event was never recorded, so there is nothing to wait for.
    if (event.ticket == nullptr) return cudaSuccess;
    return invalidate(*stream.capture, cudaErrorStreamCaptureIsolation);
  }
  if (std::ranges::find(machine().captures, event.capture) == machine().captures.end())
    return cudaErrorCapturedEvent;  // The event's capture has ended.
  if (stream.capture != nullptr && stream.capture != event.capture) {
    stream.capture->invalid = true;
    return invalidate(*event.capture, cudaErrorStreamCaptureMerge);
  }
  if (event.capture->invalid) return cudaErrorStreamCaptureInvalidated;
  join(event.capture, stream);
  for (const Node* node : event.captured) {
    if (std::ranges::find(stream.tail, node) == stream.tail.end()) stream.tail.push_back(node);
  }
  return cudaSuccess;
}

}  // namespace gradwire::standin

using namespace gradwire::standin;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  GW_STANDIN_CALL(cudaStreamBeginCapture);
  const Lock lock(machine().mutex);
  CUstream_st* const stream = find_stream(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (handle == nullptr) return failed(cudaErrorStreamCaptureUnsupported);
  if (stream->capture != nullptr) return failed(cudaErrorIllegalState);
  auto capture = std::make_shared<Capture>();
  capture->id = ++machine().captures_made;
  capture->origin = stream;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  join(capture, *stream);
  machine().captures.push_back(std::move(capture));
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  GW_STANDIN_CALL(cudaStreamEndCapture);
  const Lock lock(machine().mutex);
  *graph = nullptr;
  CUstream_st* const stream = find_stream(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture == nullptr) return failed(cudaErrorIllegalState);
  if (capture->origin != stream) return failed(invalidate(*capture, cudaErrorStreamCaptureUnmatched));
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return failed(invalidate(*capture, cudaErrorStreamCaptureWrongThread));
  const std::set<const Node*> joined = with_predecessors(stream->tail);
  const bool all_joined = std::ranges::all_of(capture->streams, [&](const CUstream_st* s) {
    return std::ranges::all_of(s->tail, [&](const Node* node) { return joined.contains(node); });
  });
  end(capture);
  if (capture->invalid) return failed(cudaErrorStreamCaptureInvalidated);
  if (!all_joined) return failed(cudaErrorStreamCaptureUnjoined);
  *graph = new CUgraph_st{capture->nodes};
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  GW_STANDIN_CALL(cudaStreamIsCapturing);
  const Lock lock(machine().mutex);
  const CUstream_st* const stream = find_stream(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  *status = stream->capture == nullptr ? cudaStreamCaptureStatusNone
            : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                       : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  GW_STANDIN_CALL(cudaStreamGetCaptureInfo);
  if (graph != nullptr || dependencies != nullptr || edges != nullptr || count != nullptr)
    return failed(cudaErrorNotSupported);
  const Lock lock(machine().mutex);
  const CUstream_st* const stream = find_stream(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  *status = stream->capture == nullptr ? cudaStreamCaptureStatusNone
            : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                       : cudaStreamCaptureStatusActive;
  if (id != nullptr && stream->capture != nullptr) *id = stream->capture->id;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  GW_STANDIN_CALL(cudaThreadExchangeStreamCaptureMode);
  std::swap(*mode, mode_of_thread);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  GW_STANDIN_CALL(cudaGraphInstantiate);
  *executable = new CUgraphExec_st{graph->nodes};
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) {
  GW_STANDIN_CALL(cudaGraphUpload);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  GW_STANDIN_CALL(cudaGraphDestroy);
  delete graph;
  return cudaSuccess;
}
// Frees the executable graph. A launch that is still running keeps the graph's nodes alive.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  GW_STANDIN_CALL(cudaGraphExecDestroy);
  delete executable;
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  GW_STANDIN_CALL(cudaGraphLaunch);
  Lock lock(machine().mutex);
  CUstream_st* const stream = find_stream(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (stream->capture != nullptr) return failed(cudaErrorNotSupported);
  wait_until_launches_may_begin(lock, stream->device);
  Op op{.name = "a graph"};
  std::map<const Node*, std::shared_ptr<Ticket>> tickets;
  for (const auto& node : executable->nodes) {
    op.devices |= node->op.devices;
    if (node->op.kind != Op::Kind::record) continue;
    auto& ticket = tickets[node.get()] = std::make_shared<Ticket>();
    ticket->stream = stream;
    node->op.event->ticket = ticket;
  }
  op.run = [keep = executable->nodes, tickets,
            ordered = in_some_order(executable->nodes, machine().random())] {
    for (const Node* node : ordered) {
      if (node->op.kind == Op::Kind::work) {
        node->op.run();
      } else {
        const std::lock_guard running(machine().mutex);
        mark(*tickets.at(node));
      }
    }
  };
  return failed(enqueue(*stream, std::move(op)));
}

}  // extern "C"
