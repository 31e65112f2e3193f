// Streams that a test stops. Work enqueued on a stopped stream cannot run until the test releases the stream.
// A call that waits for a stopped stream blocks.
#include "tests/standin/machine.h"

using namespace gradwire::standin;

extern "C" {

// Stops a stream after the work that is already enqueued. Returns a handle for standin_release(), or null if
// the stream does not exist.
void* standin_hold(cudaStream_t handle) {
  const Lock lock(machine().mutex);
  CUstream_st* const stream = find_stream(handle);
  if (stream == nullptr) return nullptr;
  auto ticket = std::make_shared<Ticket>();
  if (enqueue(*stream, {.kind = Op::Kind::wait, .name = "standin_hold", .ticket = ticket}) != cudaSuccess)
    return nullptr;
  return new std::shared_ptr<Ticket>(std::move(ticket));
}

// Resumes a stopped stream and frees `hold`. `handle` is the stopped stream.
void standin_release(void* hold, cudaStream_t handle) {
  const Lock lock(machine().mutex);
  auto* const ticket = static_cast<std::shared_ptr<Ticket>*>(hold);
  mark(**ticket);
  delete ticket;
  if (CUstream_st* const stream = find_stream(handle)) enqueue_record(*stream);
}

}  // extern "C"
