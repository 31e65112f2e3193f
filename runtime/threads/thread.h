// A thread that never ends the process, even if the system refuses the thread or if its handle is dropped.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <string_view>

#include "runtime/util/error.h"

#ifdef __x86_64__
#include <xmmintrin.h>
#endif

namespace gradwire {

class Thread {
 public:
  Thread() = default;
  // Runs `body` on a new thread with a stack of at least 2 MiB, independent of `ulimit -s`.
  // @param what names the thread in the error: "a thread of stream 'compute'"
  // @param body must not throw
  // @throws OutOfResources if the system refuses the thread; `body` is then dropped without a call
  Thread(std::string_view what, std::function<void()> body);
  ~Thread() { join(); }
  Thread(Thread&& other) noexcept;
  Thread& operator=(Thread&& other) noexcept;

  bool joinable() const { return joinable_; }
  // Waits until the thread has ended. Returns at once if there is no thread.
  void join();
  void detach();
  bool is_current() const { return joinable_ && pthread_equal(handle_, pthread_self()) != 0; }

 private:
  pthread_t handle_ = {};
  bool joinable_ = false;
};

// A static T per thread, which the thread's first get() creates. Throws std::bad_alloc if memory is refused;
// for a thread_local T with a destructor glibc would end the process.
template <typename T>
class PerThread {
 public:
  PerThread() {
    if (pthread_key_create(&key_, [](void* mine) { delete static_cast<T*>(mine); }) != 0)
      throw std::bad_alloc();
  }
  T& get() {
    if (void* const mine = pthread_getspecific(key_)) return *static_cast<T*>(mine);
    auto fresh = std::make_unique<T>();
    if (pthread_setspecific(key_, fresh.get()) != 0) throw std::bad_alloc();
    return *fresh.release();
  }

 private:
  pthread_key_t key_ = {};
};

// The processors and the memory that this process may use.

// Returns the number of processors in this process's affinity mask, which cpusets also limit.
int cpus_by_affinity();

// Returns the processor time, in processors, that this process's control groups allow (cpu.max, or
// cpu.cfs_quota_us of version 1), rounded up; 0 without a limit. Such quotas limit containers. `root`: the
// folder with /proc and /sys, for tests.
int cpus_by_quota(const std::string& root = "");

// Returns the bytes that this process's control groups allow (memory.max, or memory.limit_in_bytes); 0
// without a limit.
int64_t memory_by_limit(const std::string& root = "");

// The floating-point mode of Gradwire's computations: rounding to nearest, with subnormal numbers,
// independent of the program's mode.

// Sets the default floating-point mode of the processor for this thread during this object's lifetime, then
// restores the earlier mode. Ranks must hold the same bits even if one rank has set flush-to-zero
// (torch.set_flush_denormal). Threads inherit the mode of the thread that starts them.
class DefaultFloatMode {
 public:
#ifdef __x86_64__
  DefaultFloatMode() : before_(_mm_getcsr()) {
    if (differs()) _mm_setcsr(kDefault);
  }
  ~DefaultFloatMode() {
    if (differs()) _mm_setcsr(before_);
  }
#else
  DefaultFloatMode() = default;
#endif
  DefaultFloatMode(const DefaultFloatMode&) = delete;

 private:
#ifdef __x86_64__
  static constexpr uint32_t kDefault = 0x1f80, kSticky = 0x3f;  // kSticky: the exception flags
  bool differs() const {
    return ((before_ ^ kDefault) & ~kSticky) != 0;
  }
  const uint32_t before_;
#endif
};

// Errors for refused resources: memory, threads, file descriptors. The text names the limit and the remedy.

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
