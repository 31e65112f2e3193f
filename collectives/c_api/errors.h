// Maps exceptions to statuses.
#pragma once

#include <fmt/format.h>

#include <utility>

#include <gradwire/gradwire.h>
#include "runtime/device/device.h"
#include "runtime/util/error.h"

namespace gradwire::c_api {

// The exceptions for statuses that only the C ABI has.
class BadHandle : public Error {
 public:
  using Error::Error;
};
class Unsupported : public Error {
 public:
  using Error::Error;
};
class NotDone : public Error {
 public:
  using Error::Error;
};

// Returns the status for the current exception, and stores "FUNCTION: text" for gw_last_error(). Must be
// called in a catch block.
gw_status status_of_current_exception(const char* function) noexcept;

// Runs `body`; never throws. Maps exceptions to a status, and restores the caller's current CUDA device.
template <typename Body>
gw_status guarded(const char* function, Body&& body) noexcept {
  const detail::CallersDevice callers_device;
  try {
    body();
    return GW_OK;
  } catch (...) {
    return status_of_current_exception(function);
  }
}

// Throws BadInput with the formatted text unless `condition` holds.
template <typename... Args>
void require(bool condition, fmt::format_string<Args...> text, Args&&... args) {
  if (!condition) throw BadInput(fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace gradwire::c_api
