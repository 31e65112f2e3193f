// gw_request_*: collective calls on the host that return at once, and waiting for them.
#include "collectives/c_api/request.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "collectives/c_api/errors.h"
#include "collectives/c_api/handles.h"

namespace gradwire::c_api {
namespace {

using Clock = std::chrono::steady_clock;

// Of this thread, for its next call.
thread_local std::shared_ptr<ApiRequest> next_request;

std::shared_ptr<ApiRequest> live(gw_request handle) {
  auto request = requests().get(handle);
  request->comm->check_caller();
  return request;
}

}  // namespace

Handles<ApiRequest>& requests() {
  static auto* handles = new Handles<ApiRequest>(3, "request");
  return *handles;
}

ApiRequest::ApiRequest(std::shared_ptr<ApiComm> c)
    : comm(std::move(c)), done_(Event::create(comm->communicator->device())) {}

void ApiRequest::finish() const {
  if (!started_) return;
  try {
    done_.synchronize();
  } catch (...) {  // reported to whoever waited for it
  }
}

void ApiRequest::start(const Stream& stream) {
  done_.record(stream);
  started_ = true;
}

bool ApiRequest::wait_until(Clock::time_point deadline) const {
  require(started_,
          "no call was made for the request, or it was refused: gw_request_begin() is followed by a "
          "collective call on "
          "the same communicator and thread");
  bool done = false;
  comm->wait_and_tell([&] { done = done_.synchronize_until(deadline); });
  return done;
}

CallRequest::CallRequest(ApiComm& comm)
    : comm_(comm),
      request_(next_request != nullptr && next_request->comm.get() == &comm
                   ? std::exchange(next_request, nullptr)
                   : nullptr) {
  comm_.request = request_.get();
}

void CallRequest::start() {
  if (request_ != nullptr) request_->start(comm_.caller_stream(nullptr));
}

LockedCall::LockedCall(gw_comm handle) : tag(take_tag(handle)), held(handle), request(*held.comm) {}

}  // namespace gradwire::c_api

using namespace gradwire;
using namespace gradwire::c_api;

extern "C" {

gw_status gw_request_begin(gw_comm comm, gw_request* request) {
  return guarded(__func__, [&] {
    require(request != nullptr, "request is null");
    LockedComm locked(comm);
    if (locked->communicator->device().is_cuda()) {
      throw Unsupported(
          "calls on a CUDA device return at once as they are: their stream tells when they are done");
    }
    auto made = std::make_shared<ApiRequest>(locked.comm);
    next_request = made;
    *request = static_cast<gw_request>(requests().add(std::move(made)));
  });
}

gw_status gw_request_test(gw_request request, int32_t* done) {
  return guarded(__func__, [&] {
    require(done != nullptr, "done is null");
    *done = live(request)->wait_until(Clock::now()) ? 1 : 0;
  });
}

gw_status gw_request_wait(gw_request request, int64_t timeout_ms) {
  return guarded(__func__, [&] {
    require(timeout_ms >= 0, "timeout_ms is {}, must not be negative", timeout_ms);
    constexpr int64_t kMost = 1000LL * 3600 * 24 * 365;
    const auto deadline = Clock::now() + std::chrono::milliseconds(std::min(timeout_ms, kMost));
    if (!live(request)->wait_until(deadline)) {
      throw NotDone(fmt::format("the call is not done after {} ms, and goes on", timeout_ms));
    }
  });
}

gw_status gw_request_destroy(gw_request request) {
  return guarded(__func__, [&] {
    if (request == nullptr) return;
    auto object = live(request);
    if (next_request == object) next_request = nullptr;
    requests().remove(request);
    object->finish();
  });
}

}  // extern "C"
