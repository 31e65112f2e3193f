// Streams and events.
#include <algorithm>

#include "tests/standin/machine.h"

using namespace gradwire::standin;

namespace {

EventState* find_event(cudaEvent_t event) {
  return event != nullptr && machine().events.contains(event) ? event->state.get() : nullptr;
}

cudaError_t make_event(cudaEvent_t* event, unsigned flags) {
  const Lock lock(machine().mutex);
  auto* const made = new CUevent_st;
  made->state = std::make_shared<EventState>();
  made->state->device = current_device();
  made->state->timing = (flags & cudaEventDisableTiming) == 0;
  machine().events.insert(made);
  *event = made;
  return cudaSuccess;
}

cudaError_t record(cudaEvent_t handle, cudaStream_t stream_handle, bool external) {
  const Lock lock(machine().mutex);
  EventState* const event = find_event(handle);
  CUstream_st* const stream = find_stream(stream_handle);
  if (event == nullptr || stream == nullptr || event->device != stream->device)
    return failed(cudaErrorInvalidResourceHandle);
  if (stream->capture != nullptr) return failed(record_event_in_capture(*stream, handle->state, external));
  event->capture = nullptr;
  event->captured.clear();
  event->ticket = enqueue_record(*stream);
  return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  GW_STANDIN_CALL(cudaDeviceGetStreamPriorityRange);
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  GW_STANDIN_CALL(cudaStreamCreateWithPriority);
  if (flags != cudaStreamNonBlocking)
    return failed(cudaErrorNotSupported);  // the stand-in has no implicit order with the default stream
  const Lock lock(machine().mutex);
  auto made = std::make_unique<CUstream_st>();
  made->device = current_device();
  made->number = ++machine().streams_made;
  connect(*made);
  *stream = made.get();
  machine().streams.push_back(std::move(made));
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
// Destroys a stream without waiting. Enqueued work still runs.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  GW_STANDIN_CALL(cudaStreamDestroy);
  const Lock lock(machine().mutex);
  CUstream_st* const stream = find_stream(handle);
  if (stream == nullptr || handle == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (stream->capture != nullptr) return failed(cudaErrorStreamCaptureUnsupported);
  stream->destroyed = true;
  drop_ended_streams();
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  GW_STANDIN_CALL(cudaStreamSynchronize);
  Lock lock(machine().mutex);
  CUstream_st* const stream = find_stream(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (stream->capture != nullptr) {
    stream->capture->invalid = true;
    return failed(cudaErrorStreamCaptureUnsupported);
  }
  if (const cudaError_t status = forbid_while_capturing(); status != cudaSuccess) return failed(status);
  const auto device = static_cast<size_t>(stream->device);
  wait_for(lock, enqueue_record(*stream));
  return failed(machine().devices[device].sticky);
}

cudaError_t cudaDeviceSynchronize() {
  GW_STANDIN_CALL(cudaDeviceSynchronize);
  Lock lock(machine().mutex);
  if (const cudaError_t status = forbid_while_capturing(); status != cudaSuccess) return failed(status);
  wait_for_device(lock, current_device());
  return failed(machine().devices[current_device()].sticky);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned) {
  GW_STANDIN_CALL(cudaStreamWaitEvent);
  const Lock lock(machine().mutex);
  EventState* const event = find_event(handle);
  CUstream_st* const stream = find_stream(stream_handle);
  if (event == nullptr || stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (stream->capture != nullptr || event->capture != nullptr)
    return failed(wait_in_capture(*stream, *event));
  if (event->ticket == nullptr || event->ticket->done) return cudaSuccess;
  return failed(
      enqueue(*stream, {.kind = Op::Kind::wait, .name = "cudaStreamWaitEvent", .ticket = event->ticket}));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  GW_STANDIN_CALL(cudaEventCreateWithFlags);
  return make_event(event, flags);
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  GW_STANDIN_CALL(cudaEventCreate);
  return make_event(event, cudaEventDefault);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  GW_STANDIN_CALL(cudaEventDestroy);
  const Lock lock(machine().mutex);
  if (machine().events.erase(event) == 0) return failed(cudaErrorInvalidResourceHandle);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  GW_STANDIN_CALL(cudaEventRecord);
  return record(event, stream, false);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  GW_STANDIN_CALL(cudaEventRecordWithFlags);
  return record(event, stream, flags == cudaEventRecordExternal);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  GW_STANDIN_CALL(cudaEventQuery);
  const Lock lock(machine().mutex);
  EventState* const event = find_event(handle);
  if (event == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (event->capture != nullptr) return failed(cudaErrorCapturedEvent);
  if (const cudaError_t status = forbid_while_capturing(); status != cudaSuccess) return failed(status);
  if (event->ticket != nullptr && !event->ticket->done) return cudaErrorNotReady;
  return failed(machine().devices[event->device].sticky);
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  GW_STANDIN_CALL(cudaEventSynchronize);
  Lock lock(machine().mutex);
  EventState* const event = find_event(handle);
  if (event == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (event->capture != nullptr) return failed(cudaErrorCapturedEvent);
  if (const cudaError_t status = forbid_while_capturing(); status != cudaSuccess) return failed(status);
  const auto device = static_cast<size_t>(event->device);
  if (event->ticket != nullptr) wait_for(lock, std::shared_ptr<Ticket>(event->ticket));
  return failed(machine().devices[device].sticky);
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin_handle, cudaEvent_t end_handle) {
  GW_STANDIN_CALL(cudaEventElapsedTime);
  const Lock lock(machine().mutex);
  const EventState* const begin = find_event(begin_handle);
  const EventState* const end = find_event(end_handle);
  for (const EventState* event : {begin, end}) {
    if (event == nullptr || !event->timing || event->device != begin->device ||
        (event->ticket == nullptr && event->capture == nullptr))
      return failed(cudaErrorInvalidResourceHandle);
    if (event->capture != nullptr) return failed(cudaErrorCapturedEvent);
    if (!event->ticket->done) return cudaErrorNotReady;
  }
  *ms = std::chrono::duration<float, std::milli>(end->ticket->time - begin->ticket->time).count();
  return cudaSuccess;
}

}  // extern "C"
