#include "trainer/train/drift.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "trainer/log/console.h"
#include "trainer/log/summary.h"

namespace gradwire {

void DriftDetector::add_step(double links_ms, double step_ms) {
  if (!std::isfinite(links_ms) || !std::isfinite(step_ms)) return;
  if (++steps_ == options_.quiet) end_quiet_steps();
  if (steps_ <= kWarmup) return;
  if (links_.size() < kBaseline) {
    links_.push_back(links_ms);
    steps_ms_.push_back(step_ms);
    if (links_.size() == kBaseline) set_baseline();
    return;
  }
  const double z = std::clamp((links_ms - median_) / deviation_, -kMost, kMost);
  above_ = std::max(0.0, above_ + z - kSlack);
  below_ = std::max(0.0, below_ - z - kSlack);
  latest_.push_back(links_ms);
  if (latest_.size() > kLatest) latest_.pop_front();
  if (above_ <= kLimit && below_ <= kLimit) return;
  if (!alarm_.empty()) return;
  alarm_ = fmt::format("the links take {} ms per step instead of {} ms",
                       milliseconds(median({latest_.begin(), latest_.end()})), milliseconds(median_));
}

void DriftDetector::set_baseline() {
  constexpr double kNormal = 1.4826;  // a normal variable's deviation per median absolute deviation
  median_ = median(links_);
  std::vector<double> distances;
  for (double ms : links_) distances.push_back(std::abs(ms - median_));
  deviation_ = std::max(kNormal * median(std::move(distances)), kLeast * median(steps_ms_));
  compare_with_prediction(median_);
}

void DriftDetector::compare_with_prediction(double links_ms) {
  if (!options_.predicted) return;
  const double links = options_.predicted->parts.links_ms, step = median(steps_ms_);
  const bool differs = links_ms > 2 * links || links > 2 * links_ms;
  if (options_.predicted->holds(step) || !differs || std::abs(links_ms - links) < 0.1 * step) return;
  alarm_ = fmt::format("the links take {} ms per step instead of the predicted {} ms", milliseconds(links_ms),
                       milliseconds(links));
}

void DriftDetector::end_quiet_steps() {
  alarm_.clear();
  above_ = below_ = 0;
  streak_ = 0;
  if (!latest_.empty()) compare_with_prediction(median({latest_.begin(), latest_.end()}));
}

void DriftDetector::add_error(double error) {
  streak_ = error <= options_.error_limit ? 0 : streak_ + 1;
  if (streak_ < kStreak || !alarm_.empty()) return;
  alarm_ = fmt::format("one encode has an error of {:.3g}, more than {:.3g}", error, options_.error_limit);
}

}  // namespace gradwire
