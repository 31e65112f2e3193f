#include "collectives/transport/run_with_deadline.h"

#include <condition_variable>
#include <memory>
#include <mutex>

#include "runtime/threads/thread.h"

namespace gradwire {

bool run_with_deadline(std::function<void()> call, RunningClock::time_point deadline,
                       const std::function<bool()>& stop) {
  constexpr std::chrono::milliseconds kLookEvery{5};
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  const auto state = std::make_shared<State>();
  Thread thread("a thread for a call with a deadline", [state, call = std::move(call)]() mutable {
    call();
    call = {};  // release captured state before the caller continues
    std::lock_guard lock(state->mutex);
    state->done = true;
    state->changed.notify_all();
  });
  std::unique_lock lock(state->mutex);
  while (!state->done) {
    const auto now = RunningClock::now();
    lock.unlock();
    const bool enough = now >= deadline || (stop && stop());
    lock.lock();
    if (state->done) break;
    if (enough) {
      thread.detach();
      return false;
    }
    state->changed.wait_until(lock,
                              stop ? std::min(deadline, now + kLookEvery) : RunningClock::slice_end(deadline),
                              [&] { return state->done; });
  }
  lock.unlock();
  thread.join();
  return true;
}

}  // namespace gradwire
