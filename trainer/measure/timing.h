// How long something takes.
#pragma once

#include <functional>

#include "runtime/device.h"

namespace gradwire {

struct Timing {
  double fastest_ms = 0;  // when nothing disturbs it
  double mean_ms = 0;     // beside whatever else is running
};

// Runs `work`, which enqueues on `stream`, once to warm up and then until `budget_ms` have passed, between 2
// and 20 times, each between two events. Blocks.
Timing time_runs(const Stream& stream, const std::function<void()>& work, double budget_ms);

}  // namespace gradwire
