// Creates communicators, for gw_comm_create() and for calls that make one communicator from another.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include <gradwire/gradwire.h>
#include "collectives/c_api/comm.h"
#include "runtime/threads/running_clock.h"
#include "runtime/util/version.h"

namespace gradwire::c_api {

// The description of this library that ranks compare when they join: another version may compute other bits.
constexpr const char* kAbout = "Gradwire " GRADWIRE_VERSION;

// Creates or joins a group. Returns this rank's communicator. Throws BadInput for invalid options.
std::unique_ptr<Communicator> create(const gw_comm_options& options);

std::chrono::milliseconds checked_timeout(int64_t timeout_ms);

// Lets another thread cancel this thread's waits; see RunningClock::cancel_by().
class CancelledBy {
 public:
  explicit CancelledBy(const volatile int32_t* flag) { RunningClock::cancel_by(flag); }
  ~CancelledBy() { RunningClock::cancel_by(nullptr); }
  CancelledBy(const CancelledBy&) = delete;
  // Throws CommError if this thread's flag is already set, because the flag does not cancel waits that begin
  // later.
  static void refuse();
};

}  // namespace gradwire::c_api
