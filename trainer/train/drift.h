// Detects that a plan of --compression auto has become wrong: the time on the links, or the error of an
// encode, has drifted for longer than noise.
//
// Links: a two-sided CUSUM of the times of the steps. The first kBaseline steps give the median and the
// deviation (from the median absolute deviation, so that outliers count little). A later step adds its
// standardized deviation, limited to kMost, minus the allowance kSlack. So an alarm needs more than
// kLimit / (kMost - kSlack) = 8 steps, however large the change, and a change within kSlack deviations, or of
// less than kSlack * kLeast = 5 % of a step, never raises one. False alarms are rarer than 1 in 10,000 steps,
// also for heavy tails and correlated times (tests/trainer/drift_test.cpp simulates them).
//
// Prediction: if the baseline's step is outside the predicted interval, and its links take twice as long as
// predicted, or half, by more than 10 % of a step, the links changed before the first step.
//
// Quiet steps: what drifts during them counts only if it lasts until they end.
//
// Error: the measurement has no noise, but gradients vary. kStreak consecutive checks must exceed the limit.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "trainer/log/observer.h"

namespace gradwire {

class DriftDetector {
 public:
  static constexpr int kWarmup = 3;  // steps that are ignored, because caches and connections are cold
  static constexpr int kBaseline = 30;
  static constexpr double kMost = 4, kSlack = 2, kLimit = 16, kLeast = 0.025;
  static constexpr int kStreak = 2;
  static constexpr size_t kLatest = 8;

  struct Options {
    double error_limit = std::numeric_limits<double>::infinity();  // the largest error of one encode
    int64_t quiet = 0;                                             // steps without an alarm
    std::optional<PredictedStep> predicted = {};
  };
  explicit DriftDetector(const Options& options) : options_(options) {}

  // Adds a step: the time of its exchanges, and the whole step. Ignores times that are not numbers.
  void add_step(double links_ms, double step_ms);
  // Adds a check of the error of one encode.
  void add_error(double error);
  // Returns what has drifted: "links take 310 ms per step instead of 12.1 ms"; empty while nothing has.
  std::string alarm() const { return steps_ < options_.quiet ? "" : alarm_; }

 private:
  void set_baseline();
  void compare_with_prediction(double links_ms);
  void end_quiet_steps();

  const Options options_;
  int64_t steps_ = 0;
  std::vector<double> links_, steps_ms_;  // of the baseline
  std::deque<double> latest_;             // the links' times of the last kLatest steps
  double median_ = 0, deviation_ = 0;
  double above_ = 0, below_ = 0;  // the sums of the test
  int streak_ = 0;
  std::string alarm_;
};

}  // namespace gradwire
