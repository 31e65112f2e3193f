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

// The caller's input is wrong: the text names the culprit and the remedy. Exit code 2.
class BadInput : public Error {
 public:
  using Error::Error;
};

// A CUDA, cuBLAS or NCCL call failed: the text contains the call and the library's message.
class DeviceError : public Error {
 public:
  using Error::Error;
};

// A deadline passed, or another rank failed: the text names the rank, the operation and the pending work.
class CommError : public Error {
 public:
  using Error::Error;
};

}  // namespace gradwire
