// Times work on a stream.
#pragma once

#include <functional>

#include "runtime/device/device.h"

namespace gradwire {

struct Timing {
  double fastest_ms = 0;  // shortest run, least disturbed by other work
  double mean_ms = 0;     // mean over the runs, which includes the effect of other work
  double deviation = 0;   // standard deviation of a run, divided by the mean
};

// Runs `work`, which enqueues on `stream`, once as a warm-up, then 2 to 20 times until `budget_ms` have
// passed. Times each run with two events. Blocks.
Timing time_runs(const Stream& stream, const std::function<void()>& work, double budget_ms);

}  // namespace gradwire
