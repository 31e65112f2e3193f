// The object behind a gw_request: a collective call on the host that returned before its result was ready.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "collectives/c_api/comm.h"
#include "runtime/device/device.h"

namespace gradwire::c_api {

struct ApiRequest {
  explicit ApiRequest(std::shared_ptr<ApiComm> comm);

  // Marks the end of the call's work on `stream`. Call start() once all work of the call is enqueued.
  void start(const Stream& stream);
  bool in_flight() const { return !done_.query(); }
  // Blocks until the call is done, or until `deadline`. Returns whether the call is done. Throws the error of
  // a failed call.
  bool wait_until(std::chrono::steady_clock::time_point deadline) const;

  // Blocks until the call no longer uses the caller's memory. Never throws.
  void finish() const;

  const std::shared_ptr<ApiComm> comm;

 private:
  Event done_;
};

// Creates the request of a call that holds a communicator's lock. Does nothing if `out` is null.
class CallRequest {
 public:
  CallRequest(const std::shared_ptr<ApiComm>& comm, gw_request* out);
  ~CallRequest();
  CallRequest(const CallRequest&) = delete;
  // Writes the handle to `out`. Call start() once all work of the call is enqueued.
  void start();
  const std::shared_ptr<ApiRequest>& get() const { return request_; }

 private:
  ApiComm& comm_;
  gw_request* const out_;
  std::shared_ptr<ApiRequest> request_;
  gw_request handle_ = nullptr;  // null: the caller owns the handle
};

// A collective call on a live communicator, and its options.
struct LockedCall {
  LockedCall(gw_comm handle, const gw_call_options* options);
  ApiComm& operator*() const { return *held.comm; }
  ApiComm* operator->() const { return held.comm.get(); }
  // Throws BadInput if the options have a residual, which `function` does not use.
  void refuse_residual(const char* function) const;

  const LockedComm held;
  const gw_call_options options;
  const std::string tag;
  CallRequest request;
};

}  // namespace gradwire::c_api
