// Errors for refused resources: memory, threads, file descriptors. The text names the limit and the remedy.
#pragma once

#include <cstddef>
#include <exception>
#include <string>
#include <string_view>

#include "runtime/util/error.h"

namespace gradwire {

// The error of a resource that the system refused: exit code 1, status GW_NO_MEMORY.
class OutOfResources : public Error {
 public:
  using Error::Error;
};

// Returns the text of an errno. If a resource is exhausted, the text also names the limit and the remedy:
// "Too many open files; this process may have 24 (ulimit -n): raise the limit".
std::string error_text(int error);

// Throws OutOfResources for the errno of a call that creates a descriptor. The text is "<what>:
// <error_text>".
[[noreturn]] void throw_refused(std::string_view what, int error);

// Throws OutOfResources. @param bytes size of the refused allocation; 0: unknown.
[[noreturn]] void throw_no_memory(size_t bytes);

// Throws OutOfResources. @param what names the thread: "a thread of stream 'compute'".
[[noreturn]] void throw_no_thread(std::string_view what);

// Returns the text for std::bad_alloc.
std::string no_memory_text(size_t bytes = 0);

// Returns the user's text of a caught exception: its what(), or no_memory_text() for std::bad_alloc.
std::string text_of(const std::exception& error);

}  // namespace gradwire
