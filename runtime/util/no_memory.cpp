#include "runtime/util/no_memory.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>

namespace gradwire {
namespace {

const char* program_name = "";

void print(const char* text) {
  static_cast<void>(!write(STDERR_FILENO, text, std::strlen(text)));
}

[[noreturn]] void terminate() {
  try {
    if (const std::exception_ptr error = std::current_exception()) std::rethrow_exception(error);
  } catch (const std::bad_alloc&) {
    print(program_name);
    print(": out of host memory; free memory, raise ulimit -v or the container's limit, or use less\n");
    _exit(1);
  } catch (...) {
  }
  __gnu_cxx::__verbose_terminate_handler();  // prints the exception, then aborts
  std::abort();
}

}  // namespace

void exit_cleanly_without_memory(const char* program) noexcept {
  program_name = program;
  std::set_terminate(terminate);
}

}  // namespace gradwire
