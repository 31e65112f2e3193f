#include "runtime/threads/running_clock.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
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

struct State {
  // Written under `mutex`. The uncounted time is written first, then the time of the reading.
  std::atomic<int64_t> stopped{0}, long_stops{0};
  std::atomic<int64_t> looked_at{0};  // 0: no Watch exists
  std::mutex mutex;
  std::mutex watches_mutex;  // guards `watches` and `thread`
  int watches = 0;
  Thread thread;
  std::condition_variable ended;  // notified when the last Watch ends, with `mutex`
};

State& state() {
  // Needs no allocation, and is never destroyed: threads may read the clock while the process exits.
  alignas(State) static std::byte memory[sizeof(State)];
  static State* const all = new (memory) State;
  return *all;
}

// Reads the time and detects a stop since the last reading. Returns the time. Requires the lock of `mutex`.
int64_t look() {
  State& s = state();
  const int64_t looked_at = s.looked_at, now = steady_ns(), gap = now - looked_at;
  if (looked_at != 0) {
    if (gap > nanoseconds(kStop).count()) s.stopped += gap - nanoseconds(kLookEvery).count();
    if (gap > nanoseconds(kLongStop).count()) ++s.long_stops;
    s.looked_at.store(now, std::memory_order_release);
  }
  return now - s.stopped;
}

}  // namespace

RunningClock::time_point RunningClock::now() noexcept {
  const State& s = state();
  // Load looked_at first: a thread that sees a sample's time then also sees the sample's `stopped`.
  const int64_t looked_at = s.looked_at.load(std::memory_order_acquire), stopped = s.stopped;
  const int64_t steady = steady_ns();
  int64_t now = steady - stopped;
  if (looked_at != 0 && steady - looked_at > nanoseconds(kStop).count()) {
    std::lock_guard lock(state().mutex);
    now = look();
  }
  return time_point(kEpoch + nanoseconds(now) + (cancelled() ? kCancelled : nanoseconds(0)));
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
  State& s = state();  // before the handler of forks, which uses it
  // A forked process lacks the parent's threads, and its copies of the mutexes may be locked.
  static const int forks = pthread_atfork(nullptr, nullptr, [] {
    const int64_t stopped = state().stopped, long_stops = state().long_stops;
    State& fresh = *new (&state()) State;
    fresh.stopped = stopped, fresh.long_stops = long_stops;
  });
  static_cast<void>(forks);
  std::lock_guard lock(s.watches_mutex);
  if (s.watches == 0) {
    s.looked_at = steady_ns();
    try {
      s.thread = Thread("the thread that notices when the process is stopped", [&s] {
        std::unique_lock waiting(s.mutex);
        while (!s.ended.wait_for(waiting, kLookEvery, [&] { return s.looked_at == 0; })) look();
      });
    } catch (...) {
      s.looked_at = 0;
      throw;
    }
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
  s.ended.notify_all();
  s.thread.join();
}

}  // namespace gradwire
