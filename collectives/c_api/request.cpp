// Requests: collective calls on the host that return at once. Also reads the options of a call.
#include "collectives/c_api/request.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "collectives/c_api/errors.h"
#include "collectives/c_api/handles.h"
#include "collectives/c_api/structs.h"
#include "collectives/c_api/text.h"

namespace gradwire::c_api {
namespace {

using Clock = std::chrono::steady_clock;

std::shared_ptr<ApiRequest> live(gw_request handle) {
  auto request = requests().get(handle);
  request->comm->check_caller();
  return request;
}

gw_call_options read_call_options(const gw_call_options* options) {
  return options == nullptr ? gw_call_options{} : read_struct<gw_call_options>(options, "gw_call_options");
}

}  // namespace

Handles<ApiRequest>& requests() {
  static auto* handles = new Handles<ApiRequest>(3, "request");
  return *handles;
}

ApiRequest::ApiRequest(std::shared_ptr<ApiComm> c)
    : comm(std::move(c)), done_(Event::create(comm->communicator->device())) {}

void ApiRequest::finish() const {
  try {
    done_.synchronize();
  } catch (...) {  // reported by gw_request_wait()
  }
}

void ApiRequest::start(const Stream& stream) {
  done_.record(stream);
}

bool ApiRequest::wait_until(Clock::time_point deadline) const {
  bool done = false;
  comm->wait_or_notify([&] { done = done_.synchronize_until(deadline); });
  return done;
}

CallRequest::CallRequest(const std::shared_ptr<ApiComm>& comm, gw_request* out) : comm_(*comm), out_(out) {
  if (out_ == nullptr) return;
  if (comm->communicator->device().is_cuda()) {
    throw Unsupported(
        "calls on a CUDA device return at once: pass no request, and synchronize with their stream");
  }
  request_ = std::make_shared<ApiRequest>(comm);
  handle_ = static_cast<gw_request>(
      requests().add(request_));  // before any work is enqueued, because add() may fail
  comm_.request = request_.get();
}

CallRequest::~CallRequest() {
  comm_.request = nullptr;
  if (handle_ != nullptr) requests().remove(handle_);
}

void CallRequest::start() {
  if (out_ == nullptr) return;
  request_->start(comm_.caller_stream(nullptr));
  *out_ = std::exchange(handle_, nullptr);
}

LockedCall::LockedCall(gw_comm handle, const gw_call_options* given)
    : held(handle),
      options(read_call_options(given)),
      tag(checked_tag(options.tag)),
      request(held.comm, options.request) {}

void LockedCall::refuse_residual(const char* function) const {
  require(options.residual == nullptr, "gw_call_options.residual is set, but {} has no residual", function);
}

}  // namespace gradwire::c_api

using namespace gradwire;
using namespace gradwire::c_api;

extern "C" {

gw_status gw_request_wait(gw_request request, int64_t timeout_ms) {
  return guarded(__func__, [&] {
    require(timeout_ms >= 0, "timeout_ms is {}, must not be negative", timeout_ms);
    constexpr int64_t kMost = 1000LL * 3600 * 24 * 365;
    const auto deadline = Clock::now() + std::chrono::milliseconds(std::min(timeout_ms, kMost));
    if (!live(request)->wait_until(deadline)) {
      throw NotDone(fmt::format("the call is not done after {} ms; it is still running", timeout_ms));
    }
  });
}

gw_status gw_request_destroy(gw_request request) {
  return guarded(__func__, [&] {
    if (request == nullptr) return;
    auto object = live(request);
    requests().remove(request);
    object->finish();
  });
}

}  // extern "C"
