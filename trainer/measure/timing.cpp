#include "trainer/measure/timing.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

namespace gradwire {

Timing time_runs(const Stream& stream, const std::function<void()>& work, double budget_ms) {
  using Clock = std::chrono::steady_clock;
  constexpr int kLeastRuns = 2, kMostRuns = 20;
  Event begin = Event::create_timer(stream.device()), end = Event::create_timer(stream.device());
  work();
  stream.synchronize();
  Timing timing{.fastest_ms = std::numeric_limits<double>::infinity()};
  double sum = 0, squares = 0;
  const auto start = Clock::now();
  for (int run = 0; run < kMostRuns; ++run) {
    begin.record(stream);
    work();
    end.record(stream);
    end.synchronize();
    const double ms = elapsed_ms(begin, end);
    sum += ms, squares += ms * ms;
    timing.fastest_ms = std::min(timing.fastest_ms, ms);
    timing.mean_ms = sum / (run + 1);
    const double variance = std::max(0.0, squares - sum * timing.mean_ms) / std::max(run, 1);
    timing.deviation = sum > 0 ? std::sqrt(variance) / timing.mean_ms : 0;
    const std::chrono::duration<double, std::milli> taken = Clock::now() - start;
    if (run + 1 >= kLeastRuns && taken.count() > budget_ms) break;
  }
  return timing;
}

}  // namespace gradwire
