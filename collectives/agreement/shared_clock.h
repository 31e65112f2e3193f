// An instant expressed on every rank's clock, even if the clocks differ. It aligns traces of different
// processes.
#pragma once

#include <chrono>
#include <functional>

#include "collectives/transport/transport.h"

namespace gradwire {

struct SharedInstant {
  std::chrono::steady_clock::time_point here;  // the instant on this process's clock
  double error_us = 0;                         // upper bound of the error
};

// Returns one instant on every rank's clock, by a few round trips between rank 0 and each other rank. The
// error is half of the shortest round trip. Clocks whose difference is at most the error are treated as
// equal, as for processes on one machine. Afterwards, clocks of two machines drift apart by some microseconds
// per second. `now`: reads this process's clock; tests replace it. Collective; blocks.
SharedInstant agree_on_instant(
    Transport& transport,
    const std::function<std::chrono::steady_clock::time_point()>& now = std::chrono::steady_clock::now);

}  // namespace gradwire
