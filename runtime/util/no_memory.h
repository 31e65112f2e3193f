// A clean exit of programs when memory is refused where C++ cannot throw.
#pragma once

namespace gradwire {

// Replaces the terminate handler. If std::bad_alloc leaves a static initializer, a destructor or another
// function that must not throw, prints "<program>: out of host memory" and the remedy, and exits with
// code 1, instead of SIGABRT. Other exceptions still end with SIGABRT.
// @param program name of the program, a literal
void exit_cleanly_without_memory(const char* program) noexcept;

}  // namespace gradwire
