// A thread that never ends the process, even if the system refuses the thread or if its handle is dropped.
#pragma once

#include <pthread.h>

#include <functional>
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

}  // namespace gradwire
