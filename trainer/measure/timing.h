// The fastest of several runs: what something takes when nothing disturbs it.
#pragma once

#include <functional>

#include "kernels/device.h"

namespace gradwire {

// Runs `work`, which enqueues on `stream`, once to warm up and then until `budget_ms` have passed, between 2
// and 20 times. Returns the milliseconds of the fastest run, between two events. Blocks.
double fastest_ms(const Stream& stream, const std::function<void()>& work, double budget_ms);

}  // namespace gradwire
