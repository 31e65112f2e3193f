#include "runtime/threads/thread.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

#include "runtime/threads/resources.h"

namespace gradwire {
namespace {

// The smallest stack of a thread. glibc's default is `ulimit -s`, which may be too small for OpenBLAS and for
// the name lookup of a host.
constexpr size_t kLeastStack = size_t{2} << 20;

void* run_body(void* argument) noexcept {
  const std::unique_ptr<std::function<void()>> body(static_cast<std::function<void()>*>(argument));
  (*body)();
  return nullptr;
}

int create(pthread_t& handle, std::function<void()>* body) {
  pthread_attr_t attributes;
  if (const int error = pthread_attr_init(&attributes); error != 0) return error;
  size_t stack = 0;
  pthread_attr_getstacksize(&attributes, &stack);
  pthread_attr_setstacksize(&attributes, std::max(stack, kLeastStack));
  const int error = pthread_create(&handle, &attributes, run_body, body);
  pthread_attr_destroy(&attributes);
  return error;
}

}  // namespace

Thread::Thread(std::string_view what, std::function<void()> body) {
  auto owned = std::make_unique<std::function<void()>>(std::move(body));
  if (create(handle_, owned.get()) != 0) throw_no_thread(what);
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

}  // namespace gradwire
