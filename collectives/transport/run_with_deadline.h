// Deadlines for library calls that may wait for another rank or hang: the call runs on a separate thread, and
// the caller waits at most until the deadline.
#pragma once

#include <chrono>
#include <functional>

#include "runtime/threads/running_clock.h"

namespace gradwire {

// Runs `call` on another thread. Returns true once `call` has returned. Returns false at the deadline or soon
// after `stop()` returns true. After false, `call` may still be running, so `call` must own everything that
// it uses. `call` must not throw.
bool run_with_deadline(std::function<void()> call, RunningClock::time_point deadline,
                       const std::function<bool()>& stop = {});

}  // namespace gradwire
