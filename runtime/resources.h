// Refused resources: memory, threads, file descriptors. One error for all, whose text names the limit and the remedy.
#pragma once

#include <cstddef>
#include <exception>
#include <string>
#include <string_view>

#include "runtime/error.h"

namespace gradwire {

// The system refused a resource. Exit code 1, GW_NO_MEMORY.
class OutOfResources : public Error {
 public:
  using Error::Error;
};

// The text of an errno. Where a resource is used up it is followed by the limit and the remedy:
// "Too many open files; this process may have 24 (ulimit -n): raise the limit".
std::string error_text(int error);

// Throws OutOfResources for the errno of a call that makes a descriptor: "<what>: <error_text>".
[[noreturn]] void throw_refused(std::string_view what, int error);

// Throws OutOfResources. @param bytes how many were refused; 0: unknown.
[[noreturn]] void throw_no_memory(size_t bytes);

// Throws OutOfResources. @param what names the thread: "a thread of stream 'compute'".
[[noreturn]] void throw_no_thread(std::string_view what);

// What std::bad_alloc stands for, as text.
std::string no_memory_text(size_t bytes = 0);

// The text for users of a caught exception: its own, or no_memory_text() for std::bad_alloc.
std::string text_of(const std::exception& error);

}  // namespace gradwire
