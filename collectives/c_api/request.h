// What a gw_request refers to: a collective call on the host that has returned before it was done.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "collectives/c_api/comm.h"
#include "runtime/device/device.h"

namespace gradwire::c_api {

struct ApiRequest {
  explicit ApiRequest(std::shared_ptr<ApiComm> comm);

  // Everything that the call does is on `stream` by now.
  void start(const Stream& stream);
  bool in_flight() const { return !done_.query(); }
  // Returns whether the call is done at `deadline`. Throws the error with which it failed.
  bool wait_until(std::chrono::steady_clock::time_point deadline) const;

  // Blocks until the call is done with the caller's memory.
  void finish() const;

  const std::shared_ptr<ApiComm> comm;

 private:
  Event done_;
};

// The request of a call that holds a communicator's lock; none if `out` is null.
class CallRequest {
 public:
  CallRequest(const std::shared_ptr<ApiComm>& comm, gw_request* out);
  ~CallRequest();
  CallRequest(const CallRequest&) = delete;
  // Everything that the call does is enqueued, and the request stands for it: writes the handle to `out`.
  void start();
  const std::shared_ptr<ApiRequest>& get() const { return request_; }

 private:
  ApiComm& comm_;
  gw_request* const out_;
  std::shared_ptr<ApiRequest> request_;
  gw_request handle_ = nullptr;  // null: the caller has it
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
