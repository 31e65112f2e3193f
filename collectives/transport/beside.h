// Calls into libraries that may wait for another rank, or for ever: they run on a thread of their own, and their
// caller waits no longer than until a deadline.
#pragma once

#include <chrono>
#include <functional>

#include "runtime/running_clock.h"

namespace gradwire {

// Runs `call` beside the caller and returns true when it has returned. False at the deadline, or soon after `stop`
// says so: `call` may then still be running and is left to itself, so it must own all that it uses. Must not throw.
bool run_beside(std::function<void()> call, RunningClock::time_point deadline,
                const std::function<bool()>& stop = {});

}  // namespace gradwire
