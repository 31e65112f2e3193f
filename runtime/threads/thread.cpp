#include "runtime/threads/thread.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <new>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/util/parse.h"

namespace gradwire {
Thread::Thread(std::string_view what, std::function<void()> body) {
  // The smallest stack. glibc's default is `ulimit -s`, which may be too small for OpenBLAS and for the name
  // lookup of a host.
  constexpr size_t kMinStack = size_t{2} << 20;
  auto owned = std::make_unique<std::function<void()>>(std::move(body));
  const auto run = [](void* argument) noexcept -> void* {
    const std::unique_ptr<std::function<void()>> mine(static_cast<std::function<void()>*>(argument));
    (*mine)();
    return nullptr;
  };
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) throw_no_thread(what);
  size_t stack = 0;
  pthread_attr_getstacksize(&attributes, &stack);
  pthread_attr_setstacksize(&attributes, std::max(stack, kMinStack));
  const int error = pthread_create(&handle_, &attributes, run, owned.get());
  pthread_attr_destroy(&attributes);
  if (error != 0) throw_no_thread(what);
  [[maybe_unused]] auto* const now_the_threads = owned.release();
  joinable_ = true;
}

Thread::Thread(Thread&& other) noexcept
    : handle_(other.handle_), joinable_(std::exchange(other.joinable_, false)) {}

Thread& Thread::operator=(Thread&& other) noexcept {
  if (this != &other) {
    join();
    handle_ = other.handle_;
    joinable_ = std::exchange(other.joinable_, false);
  }
  return *this;
}

void Thread::join() {
  if (std::exchange(joinable_, false)) pthread_join(handle_, nullptr);
}

void Thread::detach() {
  if (std::exchange(joinable_, false)) pthread_detach(handle_);
}

namespace {

// Returns the smallest limit that `limit_in` finds in the folders of this process's control groups and their
// parents; 0 without a limit. `limit_in` returns the limit in a group's folder, or 0.
double min_limit(const std::string& root, const std::string& controller,
                 double (*limit_in)(const std::string&)) {
  std::ifstream groups(root + "/proc/self/cgroup");
  double least = 0;
  // A line is "0::/path" in version 2 of control groups, "4:cpu,cpuacct:/path" in version 1.
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && (',' + controllers + ',').find(',' + controller + ',') == std::string::npos)
      continue;
    const std::string mount = root + "/sys/fs/cgroup" + (controllers.empty() ? "" : "/" + controllers);
    // Check the group and its parents. A container may see a path of its host that does not exist in the
    // container.
    std::string path = line.substr(second + 1);
    while (true) {
      if (!path.empty() && path.back() == '/') path.pop_back();
      const double limit = limit_in(mount + path);
      if (limit > 0 && (least == 0 || limit < least)) least = limit;
      if (path.empty()) break;
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return least;
}

}  // namespace

int cpus_by_affinity() {
  // A set has 1024 processors. The kernel refuses sets that are smaller than its own.
  for (std::vector<cpu_set_t> sets(1); sets.size() <= 1024; sets.resize(2 * sets.size())) {
    const size_t bytes = sets.size() * sizeof sets[0];
    if (sched_getaffinity(0, bytes, sets.data()) == 0) return std::max(1, CPU_COUNT_S(bytes, sets.data()));
  }
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

int cpus_by_quota(const std::string& root) {
  const auto quota_in = [](const std::string& folder) {
    std::string quota;
    double period = 0;
    if (std::ifstream file(folder + "/cpu.max"); !(file >> quota >> period)) {
      std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
      std::ifstream(folder + "/cpu.cfs_period_us") >> period;
    }
    return period <= 0 ? 0 : parse_number(quota, 0.0).value_or(0) / period;  // "max", "-1": no quota
  };
  return static_cast<int>(std::ceil(min_limit(root, "cpu", quota_in) - 1e-9));
}

int64_t memory_by_limit(const std::string& root) {
  const auto memory_in = [](const std::string& folder) {
    std::string bytes;
    if (std::ifstream file(folder + "/memory.max"); !(file >> bytes))
      std::ifstream(folder + "/memory.limit_in_bytes") >> bytes;
    const double limit = parse_number(bytes, 0.0).value_or(0);  // "max": no limit
    return limit < 0x1p62 ? limit : 0;                          // 2^63 - 4096: no limit
  };
  return static_cast<int64_t>(min_limit(root, "memory", memory_in));
}

namespace {

std::optional<rlim_t> limit(__rlimit_resource_t resource) {
  rlimit limits = {};
  if (getrlimit(resource, &limits) != 0 || limits.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return limits.rlim_cur;
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
  // 2: the kernel refuses memory that it could not back with RAM and swap.
  if (std::FILE* file = std::fopen("/proc/sys/vm/overcommit_memory", "re")) {
    if (std::fgetc(file) == '2') add("vm.overcommit_memory is 2");
    std::fclose(file);
  }
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
  throw OutOfResources("{}: {}", what, error_text(error));
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
  throw OutOfResources(
      "cannot start {}: the system refuses more threads; limits are {}the container's (pids.max) and the "
      "machine's (kernel.threads-max){}{}: raise them, or use fewer threads (GRADWIRE_THREADS)",
      what, threads ? fmt::format("{} processes and threads of this user (ulimit -u), ", *threads) : "",
      memory.empty() ? "" : "; ", memory);
}

std::string text_of(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return no_memory_text();
  return error.what();
}

}  // namespace gradwire
