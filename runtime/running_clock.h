// A steady clock that stands still while this process is stopped: by SIGSTOP or Ctrl-Z, docker pause, the freezer of a
// batch system, a debugger. Deadlines on this clock count only time in which this process ran and could have noticed an
// answer, so a job whose processes are all stopped and continued goes on. A peer that is stopped alone still misses the
// deadlines of the others, whose clocks go on.
//
// While a Watch exists, a thread looks at the time ten times a second. More than 0.4 s between two looks is time in which
// the process did not run, and is not counted, wherever the thread that asks for the time stood. A machine so busy that the
// thread is late by that much lengthens deadlines by as much, which does no harm. Without a Watch it is a steady clock.
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
  // How many times this process was stopped for more than a second, as far as a Watch has seen it.
  static int64_t long_stops() noexcept;

  // Lets another thread end the waits of this one: while `*flag` is not 0, this thread's time is a year later, so all
  // deadlines that it had are over, and those that it sets from then on are as usual. Waits notice within kNotice if they
  // end at slice_end(). Null: not any more.
  static void cancel_by(const volatile int32_t* flag) noexcept;
  static constexpr std::chrono::milliseconds kNotice{100};
  // When to look whether a wait until `deadline` was cancelled; `deadline` in a thread that nobody can cancel.
  static time_point slice_end(time_point deadline) noexcept;

  // Held by whatever has deadlines. Throws OutOfResources when the thread is refused. In a fork, those of the parent
  // have no effect.
  class Watch {
   public:
    Watch();
    ~Watch();
    Watch(const Watch&) = delete;

   private:
    const pid_t process_;
  };
};

// condition_variable::wait_until() that notices cancellation. Returns whether `condition` holds; false at the deadline.
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
