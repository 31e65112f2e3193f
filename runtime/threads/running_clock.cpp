#include "runtime/threads/running_clock.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>

#include "runtime/threads/thread.h"

namespace gradwire {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr milliseconds kLookEvery{100}, kStop{400}, kLongStop{1000};
// The offset that keeps now() above std::chrono::steady_clock::now(), so that waiting until time_point::max()
// does not overflow.
constexpr nanoseconds kEpoch = hours(24 * 365 * 100);
constexpr nanoseconds kCancelled = hours(24 * 365);

thread_local const volatile int32_t* cancel_flag = nullptr;

int64_t steady_ns() {
  return nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Looker {
  std::mutex mutex;
  std::condition_variable changed;
  bool stop = false;
  Thread thread;
};

struct State {
  // Written under `mutex`. The uncounted time is written first, then the time of the reading.
  std::atomic<int64_t> stopped{0}, long_stops{0};
  std::atomic<int64_t> looked_at{0};  // 0: no Watch exists
  std::mutex mutex;
  std::mutex watches_mutex;  // guards the members below
  int watches = 0;
  Looker* looker = nullptr;
};

State& state() {
  static constinit State all;  // has no destructor: threads may read the clock while the process exits
  return all;
}

// Reads the time and detects a stop since the last reading. Returns the time.
int64_t look() {
  State& s = state();
  std::lock_guard lock(s.mutex);
  const int64_t looked_at = s.looked_at, now = steady_ns(), gap = now - looked_at;
  if (looked_at != 0) {
    if (gap > nanoseconds(kStop).count()) s.stopped += gap - nanoseconds(kLookEvery).count();
    if (gap > nanoseconds(kLongStop).count()) ++s.long_stops;
    s.looked_at.store(now, std::memory_order_release);
  }
  return now - s.stopped;
}

// Resets the state in a forked process: the fork lacks the parent's threads, and its copies of the mutexes
// may be locked.
void forget_parent() {
  State& s = state();
  new (&s.mutex) std::mutex;
  new (&s.watches_mutex) std::mutex;
  s.looked_at = 0;
  s.watches = 0;
  s.looker = nullptr;
}

}  // namespace

RunningClock::time_point RunningClock::now() noexcept {
  const State& s = state();
  // Load looked_at first: a thread that sees a sample's time then also sees the sample's `stopped`.
  const int64_t looked_at = s.looked_at.load(std::memory_order_acquire), stopped = s.stopped;
  const int64_t steady = steady_ns();
  const bool stop = looked_at != 0 && steady - looked_at > nanoseconds(kStop).count();
  return time_point(kEpoch + nanoseconds(stop ? look() : steady - stopped) +
                    (cancelled() ? kCancelled : nanoseconds(0)));
}

bool RunningClock::cancelled() noexcept {
  return cancel_flag != nullptr && __atomic_load_n(cancel_flag, __ATOMIC_RELAXED) != 0;
}

void RunningClock::cancel_by(const volatile int32_t* flag) noexcept {
  cancel_flag = flag;
}

RunningClock::time_point RunningClock::slice_end(time_point deadline) noexcept {
  return cancel_flag == nullptr ? deadline : std::min(deadline, now() + kNotice);
}

int64_t RunningClock::long_stops() noexcept {
  now();
  return state().long_stops;
}

RunningClock::Watch::Watch() : process_(getpid()) {
  static const int forks = pthread_atfork(nullptr, nullptr, forget_parent);
  static_cast<void>(forks);
  State& s = state();
  std::lock_guard lock(s.watches_mutex);
  if (s.watches == 0) {
    auto looker = std::make_unique<Looker>();
    looker->thread = Thread("the thread that notices when the process is stopped", [looker = looker.get()] {
      std::unique_lock waiting(looker->mutex);
      while (!looker->changed.wait_for(waiting, kLookEvery, [&] { return looker->stop; })) look();
    });
    s.looker = looker.release();
    std::lock_guard looking(s.mutex);
    s.looked_at = steady_ns();
  }
  ++s.watches;
}

RunningClock::Watch::~Watch() {
  if (getpid() != process_) return;
  State& s = state();
  std::lock_guard lock(s.watches_mutex);
  if (--s.watches > 0) return;
  {
    std::lock_guard looking(s.mutex);
    s.looked_at = 0;
  }
  {
    std::lock_guard stopping(s.looker->mutex);
    s.looker->stop = true;
  }
  s.looker->changed.notify_all();
  s.looker->thread.join();
  delete s.looker;
  s.looker = nullptr;
}

}  // namespace gradwire
