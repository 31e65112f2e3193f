#include "trainer/measure/timing.h"

#include <algorithm>
#include <chrono>
#include <limits>

namespace gradwire {

double fastest_ms(const Stream& stream, const std::function<void()>& work, double budget_ms) {
  using Clock = std::chrono::steady_clock;
  constexpr int kLeastRuns = 2, kMostRuns = 20;
  Event begin = Event::create(stream.device()), end = Event::create(stream.device());
  work();
  stream.synchronize();
  double best = std::numeric_limits<double>::infinity();
  const auto start = Clock::now();
  for (int run = 0; run < kMostRuns; ++run) {
    begin.record(stream);
    work();
    end.record(stream);
    end.synchronize();
    best = std::min(best, elapsed_ms(begin, end));
    const std::chrono::duration<double, std::milli> taken = Clock::now() - start;
    if (run + 1 >= kLeastRuns && taken.count() > budget_ms) break;
  }
  return best;
}

}  // namespace gradwire
