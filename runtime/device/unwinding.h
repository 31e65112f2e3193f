// Exceptions while work is in flight.
#pragma once

#include <exception>

#include "runtime/device/device.h"

namespace gradwire {

// Waits for a stream when an exception leaves the scope, because enqueued work may use objects of the scope.
// Declare it after these objects.
class FinishOnError {
 public:
  explicit FinishOnError(const Stream& stream) : stream_(stream) {}
  ~FinishOnError() {
    if (std::uncaught_exceptions() == before_) return;
    try {
      stream_.synchronize();
    } catch (...) {  // the exception that leaves the scope is reported
    }
  }
  FinishOnError(const FinishOnError&) = delete;

 private:
  const Stream& stream_;
  const int before_ = std::uncaught_exceptions();
};

}  // namespace gradwire
