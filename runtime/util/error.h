// Exceptions thrown inside Gradwire: status codes at the C ABI, exit codes at the command line.
#pragma once

#ifndef __CUDACC__  // nvcc rejects the checks of fmt's texts at compile time
#include <fmt/core.h>
#endif

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gradwire {

// Base of all exceptions that this library throws on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
#ifndef __CUDACC__
  // Formats the text: throw BadInput("{}: no such file", path).
  template <typename First, typename... Rest>
  Error(fmt::format_string<First, Rest...> text, First&& first, Rest&&... rest)
      : runtime_error(fmt::format(text, std::forward<First>(first), std::forward<Rest>(rest)...)) {}
#endif
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

#ifndef __CUDACC__
// Throws BadInput, or another error, with the formatted text unless `condition` holds. The arguments are
// evaluated in any case.
template <typename Thrown = BadInput, typename... Args>
void require(bool condition, fmt::format_string<Args...> text, Args&&... args) {
  if (!condition) throw Thrown(fmt::format(text, std::forward<Args>(args)...));
}
#endif

// A clean exit of programs when memory is refused where C++ cannot throw.

// Replaces the terminate handler. If std::bad_alloc leaves a static initializer, a destructor or another
// function that must not throw, prints "<program>: out of host memory" and the remedy, and exits with
// code 1, instead of SIGABRT. Other exceptions still end with SIGABRT.
// @param program name of the program, a literal
void exit_cleanly_without_memory(const char* program) noexcept;

// Suggests the name that a user may have meant.

// Returns a text such as "; did you mean 'int4'?" if one of the names is similar to the wrong name; otherwise
// "".
std::string suggestion(std::string_view wrong, const std::vector<std::string_view>& names);

}  // namespace gradwire
