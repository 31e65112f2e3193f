// What a gw_request refers to: a collective call on the host that has returned before it was done.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>

#include "collectives/c_api/comm.h"
#include "runtime/device.h"

namespace gradwire::c_api {

struct ApiRequest {
  explicit ApiRequest(std::shared_ptr<ApiComm> comm);

  // Everything that the call does is on `stream` by now.
  void start(const Stream& stream);
  bool in_flight() const { return started_ && !done_.query(); }
  // False when the call is not done at `deadline`. Throws what it failed with; BadInput if there was no call.
  bool wait_until(std::chrono::steady_clock::time_point deadline) const;

  // Waits until the call, if there was one, is done with the caller's memory.
  void finish() const;

  const std::shared_ptr<ApiComm> comm;

 private:
  std::atomic<bool> started_ = false;
  Event done_;
};

// While a locked communicator makes a call: the request that gw_request_begin() made for it on this thread, if it did.
class CallRequest {
 public:
  explicit CallRequest(ApiComm& comm);
  ~CallRequest() { comm_.request = nullptr; }
  CallRequest(const CallRequest&) = delete;
  // Everything that the call does is enqueued, and the request stands for it.
  void start();
  const std::shared_ptr<ApiRequest>& get() const { return request_; }

 private:
  ApiComm& comm_;
  const std::shared_ptr<ApiRequest> request_;
};

// A collective call on a live communicator, with what this thread said about it before.
struct LockedCall {
  explicit LockedCall(gw_comm handle);
  ApiComm& operator*() const { return *held.comm; }
  ApiComm* operator->() const { return held.comm.get(); }

  const std::string tag;
  LockedComm held;
  CallRequest request;
};

}  // namespace gradwire::c_api
