// Exceptions thrown inside Gradwire: status codes at the C ABI, exit codes at the command line.
#pragma once

#include <stdexcept>
#include <string>

namespace gradwire {

// Base of all exceptions that this library throws on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The error of invalid input by the caller: the text names the invalid input and the remedy. Exit code 2.
class BadInput : public Error {
 public:
  using Error::Error;
};

// The error of a failed CUDA, cuBLAS or NCCL call. The text contains the call and the library's message.
class DeviceError : public Error {
 public:
  using Error::Error;
};

// The error of a missed deadline or of another rank's failure. The text names the rank, the operation and the
// pending work.
class CommError : public Error {
 public:
  using Error::Error;
};

}  // namespace gradwire
