#include "runtime/util/no_memory.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>

namespace gradwire {
namespace {

char line[200];  // written at once, because several threads may write it

[[noreturn]] void terminate() {
  try {
    if (const std::exception_ptr error = std::current_exception()) std::rethrow_exception(error);
  } catch (const std::bad_alloc&) {
    static_cast<void>(!write(STDERR_FILENO, line, std::strlen(line)));
    _exit(1);
  } catch (...) {
  }
  __gnu_cxx::__verbose_terminate_handler();  // prints the exception, then aborts
  std::abort();
}

}  // namespace

void exit_cleanly_without_memory(const char* program) noexcept {
  snprintf(line, sizeof line,
           "%s: out of host memory; free memory, raise ulimit -v or the container's limit, or use less\n",
           program);
  std::set_terminate(terminate);
}

}  // namespace gradwire
