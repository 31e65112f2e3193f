// A thread that never ends the process, even if the system refuses the thread or if its handle is dropped.
#pragma once

#include <pthread.h>

#include <functional>
#include <memory>
#include <new>
#include <string_view>

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

}  // namespace gradwire
