// The test that decides when a run with --compression auto measures again.
#include "trainer/train/plan_change.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "tests/support/expect.h"

namespace gradwire {
namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

using Noise = std::function<double()>;  // deviations from a mean of 0, of a deviation of about 1

// Returns the number of steps of `step_ms` until an alarm, or `most`.
int64_t steps_to_alarm(DriftDetector& detector, const Noise& noise, double mean, double deviation,
                       int64_t most, double step_ms = 1000) {
  for (int64_t step = 1; step <= most; ++step) {
    detector.add_step(mean + deviation * noise(), step_ms);
    if (!detector.alarm().empty()) return step;
  }
  return most;
}

// Returns the share of steps with a false alarm, over runs of 1000 steps. The deviation is large against
// kMin, so that only the test decides.
double false_alarms(const std::function<Noise(std::mt19937&)>& make_noise) {
  std::mt19937 random(1);
  constexpr int kRuns = 400, kSteps = 1000;
  int64_t steps = 0, alarms = 0;
  for (int run = 0; run < kRuns; ++run) {
    DriftDetector detector;
    const int64_t reached = steps_to_alarm(detector, make_noise(random), 100, 40, kSteps);
    steps += reached;
    alarms += reached < kSteps;
  }
  return static_cast<double>(alarms) / static_cast<double>(steps);
}

TEST(DriftDetector, FalseAlarmsAreRarerThanStated) {
  constexpr double kStated = 1e-4;
  EXPECT_LT(false_alarms([](std::mt19937& random) {
              return
                  [&random, normal = std::normal_distribution<double>()]() mutable { return normal(random); };
            }),
            kStated / 10);
  EXPECT_LT(false_alarms([](std::mt19937& random) {  // heavy tails
              return [&random, t = std::student_t_distribution<double>(3)]() mutable { return t(random); };
            }),
            kStated);
  EXPECT_LT(false_alarms([](std::mt19937& random) {  // skewed, as waits are
              return [&random, wait = std::exponential_distribution<double>()]() mutable {
                return wait(random);
              };
            }),
            kStated);
  EXPECT_LT(false_alarms([](std::mt19937& random) {  // each step resembles the previous one
              return [&random, normal = std::normal_distribution<double>(), last = 0.0]() mutable {
                last = 0.5 * last + std::sqrt(0.75) * normal(random);
                return last;
              };
            }),
            kStated);
}

TEST(DriftDetector, ReportsAChangeOfTheLinksWithinTenSteps) {
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  const Noise noise = [&] { return normal(random); };
  for (const double factor : {0.2, 0.5, 2.0, 10.0}) {
    DriftDetector detector;
    ASSERT_EQ(steps_to_alarm(detector, noise, 100, 5, 200, 400), 200);
    EXPECT_LE(steps_to_alarm(detector, noise, factor * 100, 5, 200, 400), 10) << factor;
    testing::expect_has(detector.alarm(), {"the links take", "instead of"});
  }
}

TEST(DriftDetector, ReportsLinksThatDifferFromThePredictionFromTheStart) {
  const auto steps = [](double links_ms, double low_ms, double high_ms) {
    DriftDetector detector(kNoLimit, 0, PredictedStep{{.links_ms = links_ms}, low_ms, high_ms});
    return steps_to_alarm(
        detector, [] { return 0; }, 100, 0, 200, 500);
  };
  EXPECT_LE(steps(10, 300, 450), 40);
  EXPECT_LE(steps(300, 600, 700), 40);
  EXPECT_EQ(steps(10, 300, 600), 200);
  EXPECT_EQ(steps(60, 300, 450), 200);
}

TEST(DriftDetector, OneSlowStepIsNotADrift) {
  DriftDetector detector;
  for (int step = 0; step < 500; ++step) detector.add_step(step % 50 == 49 ? 1e5 : 100 + step % 3, 1000);
  EXPECT_EQ(detector.alarm(), "");
}

TEST(DriftDetector, IgnoresLinksThatAreASmallPartOfTheStep) {
  DriftDetector detector;
  for (int step = 0; step < 500; ++step) detector.add_step(step < 100 ? 1 : 5, 100);
  EXPECT_EQ(detector.alarm(), "");
}

TEST(DriftDetector, ErrorMustExceedTheLimitInConsecutiveChecks) {
  DriftDetector detector(0.1);
  for (double error : {0.2, 0.1, 0.3, 0.05}) detector.add_error(error);
  EXPECT_EQ(detector.alarm(), "");
  detector.add_error(0.2);
  detector.add_error(std::numeric_limits<double>::quiet_NaN());
  testing::expect_has(detector.alarm(), {"more than 0.1"});
}

TEST(DriftDetector, ReportsALastingChangeAfterTheQuietSteps) {
  DriftDetector detector(kNoLimit, 200);
  EXPECT_EQ(steps_to_alarm(
                detector, [] { return 0; }, 100, 0, 100),
            100);
  EXPECT_EQ(steps_to_alarm(
                detector, [] { return 0; }, 300, 0, 200),
            108);
}

TEST(DriftDetector, ForgetsAChangeThatEndsWithinTheQuietSteps) {
  DriftDetector detector(0.1, 200);
  for (int step = 0; step < 500; ++step) {
    detector.add_step(step > 100 && step < 150 ? 300 : 100, 1000);
    if (step == 120 || step == 140) detector.add_error(0.2);
    ASSERT_EQ(detector.alarm(), "") << step;
  }
}

TEST(DriftDetector, ReportsLinksThatStillDifferFromThePredictionAfterTheQuietSteps) {
  DriftDetector detector(kNoLimit, 200, PredictedStep{{.links_ms = 10}, 300, 450});
  EXPECT_EQ(steps_to_alarm(
                detector, [] { return 0; }, 100, 0, 300, 500),
            200);
}

}  // namespace
}  // namespace gradwire
