// The border between exceptions and status codes.
#pragma once

#include <string>

#include "collectives/gradwire.h"
#include "runtime/error.h"

namespace gradwire::c_api {

// What gw_status has and the library's own exceptions don't.
class BadHandle : public Error {
 public:
  using Error::Error;
};
class Unsupported : public Error {
 public:
  using Error::Error;
};

// To be called in a catch block: turns the exception in flight into a status, and its text, behind the name
// of the function, into gw_last_error().
gw_status status_of_current_exception(const char* function) noexcept;

// Runs `body`, from which no exception comes out.
template <typename Body>
gw_status guarded(const char* function, Body&& body) noexcept {
  try {
    body();
    return GW_OK;
  } catch (...) {
    return status_of_current_exception(function);
  }
}

inline void require(bool condition, const std::string& text) {
  if (!condition) throw BadInput(text);
}

}  // namespace gradwire::c_api
