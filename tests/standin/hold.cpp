// Streams that a test stops: what a call enqueues on such a stream cannot run until the test releases it. A
// call that waits for the stream blocks.
#include "tests/standin/machine.h"

using namespace gradwire::standin;

extern "C" {

// Stops a stream after its work so far. Returns a handle for standin_release(); null if the stream does not
// exist.
void* standin_hold(cudaStream_t handle) {
  const Lock lock(machine().mutex);
  CUstream_st* const stream = find_stream(handle);
  if (stream == nullptr) return nullptr;
  auto ticket = std::make_shared<Ticket>();
  if (enqueue(*stream, {.kind = Op::Kind::wait, .name = "standin_hold", .ticket = ticket}) != cudaSuccess)
    return nullptr;
  return new std::shared_ptr<Ticket>(std::move(ticket));
}

// Lets a stream continue. `stream` is the one that was stopped; `hold` is freed.
void standin_release(void* hold, cudaStream_t handle) {
  const Lock lock(machine().mutex);
  auto* const ticket = static_cast<std::shared_ptr<Ticket>*>(hold);
  mark(**ticket);
  delete ticket;
  if (CUstream_st* const stream = find_stream(handle)) enqueue_record(*stream);
}

}  // extern "C"
