// A steady clock that pauses while this process is stopped: by SIGSTOP or Ctrl-Z, docker pause, the freezer
// of a batch system, a debugger. Deadlines on this clock count only time in which this process ran and could
// have noticed an answer. A job therefore continues after all its processes were stopped and continued. If
// only one process is stopped, the clocks of its peers continue, and the stopped process misses the deadlines
// of its peers.
//
// While a Watch exists, a thread reads the time ten times a second. A gap of more than 0.4 s between two
// readings counts, for every thread, as time in which the process did not run. If a busy machine delays the
// thread by that much, deadlines become longer by the delay, which does no harm. Without a Watch,
// RunningClock is a plain steady clock.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace gradwire {

class RunningClock {
 public:
  using duration = std::chrono::nanoseconds;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<RunningClock>;
  static constexpr bool is_steady = true;

  static time_point now() noexcept;
  // Returns how many times this process was stopped for more than a second, as observed by a Watch.
  static int64_t long_stops() noexcept;

  // Lets another thread end the waits of this thread. While `*flag` is not 0, this thread's time is a year
  // later, so all deadlines that were set earlier have passed; later deadlines work as usual. Waits notice
  // within kNotice if they end at slice_end(). Null: disables cancellation.
  static void cancel_by(const volatile int32_t* flag) noexcept;
  // Returns whether the flag is set. A call with deadlines must check cancelled() at its beginning, because
  // the flag ends only earlier deadlines.
  static bool cancelled() noexcept;
  static constexpr std::chrono::milliseconds kNotice{100};
  // Returns the next time at which a wait until `deadline` must check for cancellation; `deadline` itself in
  // a thread that cannot be cancelled.
  static time_point slice_end(time_point deadline) noexcept;

  // Runs the thread that reads the time; every object with deadlines holds a Watch. Throws OutOfResources
  // when the system refuses the thread. In a fork, the parent's Watches have no effect.
  class Watch {
   public:
    Watch();
    ~Watch();
    Watch(const Watch&) = delete;

   private:
    const pid_t process_;
  };
};

// Waits like condition_variable::wait_until(), and notices cancellation. Returns whether `condition` holds;
// false at the deadline.
template <typename Condition>
bool wait_until(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                RunningClock::time_point deadline, Condition condition) {
  while (!condition()) {
    if (RunningClock::now() >= deadline) return false;
    changed.wait_until(lock, RunningClock::slice_end(deadline));
  }
  return true;
}

}  // namespace gradwire
