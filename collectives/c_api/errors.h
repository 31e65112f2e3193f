// The boundary between exceptions and status codes.
#pragma once

#include <fmt/format.h>

#include <utility>

#include <gradwire/gradwire.h>
#include "runtime/device/device.h"
#include "runtime/util/error.h"

namespace gradwire::c_api {

// The statuses for which the library has no exception of its own.
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

// Call it in a catch block: returns the status for the current exception and stores "FUNCTION: text" for
// gw_last_error().
gw_status status_of_current_exception(const char* function) noexcept;

// Runs `body`, lets no exception out, and leaves the caller's current CUDA device as it was.
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

// Formats the text only when it throws.
template <typename... Args>
void require(bool condition, fmt::format_string<Args...> text, Args&&... args) {
  if (!condition) throw BadInput(fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace gradwire::c_api
