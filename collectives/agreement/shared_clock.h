// One instant that all ranks of a group can name, on clocks that need not agree: what traces of processes are
// put side by side by.
#pragma once

#include <chrono>
#include <functional>

#include "collectives/transport/transport.h"

namespace gradwire {

struct SharedInstant {
  std::chrono::steady_clock::time_point here;  // on this process's clock
  double error_us = 0;                         // by how much it may be off at most
};

// Collective, and blocks: a few round trips between rank 0 and each other rank. The error is half of the
// shortest round trip, and a clock that does not differ by more than that (two processes of one machine have
// the same) is taken for the same. Clocks of two machines drift apart later, by some microseconds per second.
// `now`: the clock of this process, another one in tests.
SharedInstant agree_on_instant(
    Transport& transport,
    const std::function<std::chrono::steady_clock::time_point()>& now = std::chrono::steady_clock::now);

}  // namespace gradwire
