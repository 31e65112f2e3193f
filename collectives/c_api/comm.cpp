#include "collectives/c_api/comm.h"

#include <fmt/format.h>
#include <unistd.h>

#include "collectives/c_api/errors.h"
#include "collectives/c_api/handles.h"
#include "kernels/wire/registered.h"
#include "runtime/threads/resources.h"

namespace gradwire::c_api {
namespace {

// Limits of the cache of programs. On a GPU the cache has a program for each address: FSDP2 makes two or
// three collectives for each of its groups, and PyTorch's allocator uses several addresses for each
// collective.
constexpr size_t kProgramsKept = 256, kProgramsKeptOnCuda = 4096;
constexpr size_t kCallerStreamsKept = 64;

}  // namespace

Handles<ApiComm>& comms() {
  static auto* handles = new Handles<ApiComm>(1, "communicator");
  return *handles;
}

ApiComm::ApiComm(std::unique_ptr<Communicator> c)
    : communicator(std::move(c)),
      process_(getpid()),
      programs_(communicator->device().is_cuda() ? kProgramsKeptOnCuda : kProgramsKept,
                [this](size_t bytes) { return communicator->transport().exchange_memory(bytes); }),
      step_(make_buffer<uint64_t>(communicator->device(), 1)),
      start_(Event::create(communicator->device())),
      done_(Event::create(communicator->device())),
      stream(Stream::create(communicator->device(), "communicate", Stream::Priority::high)) {
  fill_zero(stream, step_.data(), step_.bytes());
  stream.synchronize();
}

ApiComm::~ApiComm() {
  for (const Stream& busy : {stream, requests_}) {
    if (!busy) continue;
    try {
      busy.synchronize();
    } catch (...) {  // reported by the call that waited for the failed operation
    }
  }
  communicator->finish_transfers();
}

void ApiComm::check_process() const {
  if (getpid() != process_) {
    throw BadHandle(fmt::format(
        "the handle belongs to process {}, and this is a fork of it; create communicators after forking",
        process_));
  }
}

void ApiComm::check_caller() const {
  check_process();
  require(!in_format_callback(),
          "called by a wire format's encode or decode, for which this call would wait");
}

void ApiComm::wait_or_notify(const std::function<void()>& wait) {
  try {
    wait();
  } catch (const BadInput&) {
    throw;
  } catch (
      const std::exception& error) {  // notify the other ranks of any failure, even of a failed allocation
    bool notified = false;
    try {
      communicator->check();
    } catch (const CommError&) {
      notified = true;
    }
    if (!notified) communicator->abort(text_of(error));
    throw;
  }
}

Stream ApiComm::caller_stream(void* native) {
  const Device device = communicator->device();
  if (device.is_host()) {
    require(native == nullptr, "stream is not null, but the communicator is on the host; pass null");
    if (request == nullptr) return Stream::immediate_host();
    if (!requests_) requests_ = Stream::create(device, "requests");
    return requests_;
  }
  if (callers_.size() > kCallerStreamsKept)
    callers_.clear();  // bounds the map if the caller creates a stream per step
  auto [at, fresh] = callers_.try_emplace(native);
  if (fresh) at->second = Stream::adopt_cuda(device.index, static_cast<CudaStream>(native));
  if (at->second.is_captured()) {
    throw Unsupported(
        "the stream is being captured in a CUDA graph, whose launches would not repeat what the host does in "
        "this call: "
        "call it outside of the capture");
  }
  return at->second;
}

LockedComm::LockedComm(gw_comm handle) : comm(comms().get(handle)) {
  comm->check_caller();
  lock = std::unique_lock(comm->mutex);
}

}  // namespace gradwire::c_api
