#include "runtime/threads/running_clock.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace gradwire {
namespace {

using namespace std::chrono_literals;
using Steady = std::chrono::steady_clock;

// Runs `child` in a process that is stopped from 0.5 s to 0.5 s + `stop` after its start. Returns its exit
// code.
int run_and_stop(std::chrono::milliseconds stop, const std::function<int()>& child) {
  const pid_t process = fork();
  if (process == 0) _exit(child());
  std::this_thread::sleep_for(500ms);
  kill(process, SIGSTOP);
  std::this_thread::sleep_for(stop);
  kill(process, SIGCONT);
  int status = 0;
  waitpid(process, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Returns how long a wait of `time` on the RunningClock takes on the steady clock.
std::chrono::duration<double> wait_for_nothing(std::chrono::milliseconds time) {
  std::mutex mutex;
  std::condition_variable changed;
  std::unique_lock lock(mutex);
  const auto begin = Steady::now();
  EXPECT_FALSE(wait_until(changed, lock, RunningClock::now() + time, [] { return false; }));
  return Steady::now() - begin;
}

TEST(RunningClock, DoesNotCountTimeInWhichTheProcessIsStopped) {
  const int code = run_and_stop(2s, [] {
    const RunningClock::Watch watch;
    const bool longer = wait_for_nothing(1500ms) > 3s;
    return (longer ? 0 : 1) + (RunningClock::long_stops() > 0 ? 0 : 2);
  });
  EXPECT_EQ(code, 0);
}

TEST(RunningClock, IsASteadyClockWithoutAWatch) {
  const int code = run_and_stop(2s, [] {
    { const RunningClock::Watch ended; }
    const auto here = RunningClock::now();
    const auto begin = Steady::now();
    std::this_thread::sleep_for(1500ms);
    const auto steady = Steady::now() - begin;
    return RunningClock::now() - here >= steady && RunningClock::long_stops() == 0 ? 0 : 1;
  });
  EXPECT_EQ(code, 0);
}

TEST(RunningClock, WatchesTheForkOfAProcessThatIsWatched) {
  const RunningClock::Watch parents;
  const int code = run_and_stop(2s, [] {
    const auto here = RunningClock::now();
    std::this_thread::sleep_for(20ms);
    if (RunningClock::now() - here < 20ms) return 1;  // the fork does not contain the parent's thread
    const RunningClock::Watch watch;
    return wait_for_nothing(1500ms) > 3s ? 0 : 2;
  });
  EXPECT_EQ(code, 0);
}

TEST(RunningClock, IsMonotonicInAThread) {
  const RunningClock::Watch watch;
  auto before = RunningClock::now();
  for (int i = 0; i < 100'000; ++i) {
    const auto now = RunningClock::now();
    ASSERT_GE(now, before);
    before = now;
  }
}

TEST(RunningClock, CancellationEndsAWait) {
  volatile int32_t flag = 0;
  std::thread thread([&] {
    RunningClock::cancel_by(&flag);
    wait_for_nothing(1h);
    // The cancellation does not affect later deadlines.
    EXPECT_GE(wait_for_nothing(50ms), 50ms);
    RunningClock::cancel_by(nullptr);
  });
  std::this_thread::sleep_for(50ms);
  __atomic_store_n(&flag, 1, __ATOMIC_RELAXED);
  thread.join();
}

}  // namespace
}  // namespace gradwire
