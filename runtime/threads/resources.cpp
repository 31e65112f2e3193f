#include "runtime/threads/resources.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <optional>

namespace gradwire {
namespace {

std::optional<rlim_t> limit(__rlimit_resource_t resource) {
  rlimit limits = {};
  if (getrlimit(resource, &limits) != 0 || limits.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return limits.rlim_cur;
}

// Returns whether the kernel refuses memory that it could not back with RAM and swap.
bool strict_overcommit() {
  std::FILE* file = std::fopen("/proc/sys/vm/overcommit_memory", "re");
  if (file == nullptr) return false;
  const int setting = std::fgetc(file);
  std::fclose(file);
  return setting == '2';
}

// Returns "address space is limited to 1203 MiB (ulimit -v), vm.overcommit_memory is 2"; empty without
// limits.
std::string memory_limits() {
  std::string text;
  const auto add = [&](const std::string& more) { text += (text.empty() ? "" : ", ") + more; };
  if (const auto bytes = limit(RLIMIT_AS))
    add(fmt::format("address space is limited to {} MiB (ulimit -v)", *bytes >> 20));
  if (const auto bytes = limit(RLIMIT_DATA))
    add(fmt::format("data is limited to {} MiB (ulimit -d)", *bytes >> 20));
  if (strict_overcommit()) add("vm.overcommit_memory is 2");
  return text;
}

}  // namespace

std::string error_text(int error) {
  const char* const text = std::strerror(error);
  switch (error) {
    case EMFILE:
      return fmt::format("{}; this process may have {} (ulimit -n): raise the limit", text,
                         limit(RLIMIT_NOFILE).value_or(0));
    case ENFILE:
      return fmt::format("{}; the machine's limit (fs.file-max) is reached: raise it", text);
    case ENOMEM:
    case ENOBUFS:
      return fmt::format("{}; {}", text, no_memory_text());
    default:
      return text;
  }
}

void throw_refused(std::string_view what, int error) {
  throw OutOfResources(fmt::format("{}: {}", what, error_text(error)));
}

std::string no_memory_text(size_t bytes) {
  const std::string limits = memory_limits();
  return fmt::format("out of host memory{}{}",
                     bytes == 0 ? "" : fmt::format(": {} bytes were refused", bytes),
                     limits.empty() ? "; free memory, or use less" : fmt::format("; {}: raise it", limits));
}

void throw_no_memory(size_t bytes) {
  throw OutOfResources(no_memory_text(bytes));
}

// Throws OutOfResources for a refused thread. The text includes memory limits, because the system also
// refuses a thread if its stack cannot be mapped.
void throw_no_thread(std::string_view what) {
  const auto threads = limit(RLIMIT_NPROC);
  const std::string memory = memory_limits();
  throw OutOfResources(fmt::format(
      "cannot start {}: the system refuses more threads; limits are {}the container's (pids.max) and the "
      "machine's (kernel.threads-max){}{}: raise them, or use fewer threads (GRADWIRE_THREADS)",
      what, threads ? fmt::format("{} processes and threads of this user (ulimit -u), ", *threads) : "",
      memory.empty() ? "" : "; ", memory));
}

std::string text_of(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return no_memory_text();
  return error.what();
}

}  // namespace gradwire
