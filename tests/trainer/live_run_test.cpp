// The display and metrics of `gradwire top` for a run's log.
#include "trainer/log/console.h"

#include <gtest/gtest.h>

#include "runtime/util/error.h"
#include "tests/support/expect.h"
#include "trainer/log/records.h"
#include "trainer/log/summary.h"

namespace gradwire::testing {
namespace {

constexpr const char* kRun =
    R"({"type":"run","model":{"name":"vit_tiny"},"ranks":3,"ranks_are":"processes","device":"host",)"
    R"("compression":"int8","schedule":"ring","steps":1000})";
constexpr const char* kStep =
    R"({"type":"step","step":399,"loss":0.5,"step_ms":40,"images_per_s":2400,"wire_bytes":1e6,"dense_bytes":4e6})";

// Returns the waits in which, from second 0 to `second`, rank `late` has delayed the others for `part` of the
// time.
WaitRecord after(int second, int late, double part) {
  WaitRecord record{.step = 100 + 25 * second, .seconds = static_cast<double>(second)};
  for (int r = 0; r < 3; ++r) {
    std::vector<double> waits(3, 0.01 * second);
    if (r != late) waits[late] += part * second;
    waits[r] = 0;
    record.waited_s.push_back(waits);
  }
  return record;
}

TEST(LiveRun, NamesTheStragglerWithItsDelayAndStart) {
  LiveRun run;
  run.read(kRun);
  EXPECT_FALSE(run.finished());
  expect_has(run.text(), {"vit_tiny on 3 ranks (processes, host), int8, schedule ring", "step 0 of 1,000",
                          "No waits reported yet"});
  run.read(kStep);
  // No rank is late for 4 seconds. Then rank 2 is late by 0.4 s in each second of 25 steps.
  WaitRecord record = after(0, 2, 0);
  for (int second = 0; second < 12; ++second) {
    if (second > 0) {
      const WaitRecord whole = after(1, 2, second <= 4 ? 0 : 0.4);
      record.step += 25;
      record.seconds += 1;
      for (size_t r = 0; r < 3; ++r) {
        for (size_t p = 0; p < 3; ++p) record.waited_s[r][p] += whole.waited_s[r][p];
      }
    }
    run.read(waits_record(record));
    if (second == 4) {
      expect_has(run.text(), {"No rank is a straggler."});
    }
  }
  expect_has(
      run.text(),
      {"step 400 of 1,000 (40 %)  loss 0.5000  40.0 ms per step  2,400 images/s  sent 1.00 MB (4.00x)",
       "Rank 2 is the straggler: each other rank waits 16.0 ms longer per step (40 % of the time), since "
       "step 200, 7.0 s",
       "rank 2,"});
  run.read(R"({"type":"summary"})");
  EXPECT_TRUE(run.finished());
}

TEST(LiveRun, MetricsArePrometheusText) {
  LiveRun run;
  run.read(kRun);
  run.read(kStep);
  for (int second : {0, 1, 2}) run.read(waits_record(after(second, 1, 0.5)));
  expect_has(
      run.metrics(),
      {"# TYPE gradwire_steps_total counter\ngradwire_steps_total 400\n", "gradwire_step_seconds 0.04\n",
       "gradwire_waited_seconds_total{rank=\"0\",peer=\"1\"} 1.02\n", "gradwire_straggler_rank 1\n"});
}

TEST(LiveRun, ALossThatIsNotFiniteIsShown) {
  LiveRun run;
  run.read(kRun);
  run.read(R"({"type":"step","step":7,"loss":null})");
  expect_has(run.metrics(), {"gradwire_loss NaN\n"});
  expect_has(run.text(), {"loss nan (diverged)"});
}

TEST(LiveRun, RejectsForeignFilesAndIgnoresDamagedLines) {
  EXPECT_THROW(LiveRun().read("hello"), BadInput);
  EXPECT_THROW(LiveRun().read(R"({"type":"step"})"), BadInput);
  LiveRun run;
  run.read(R"({"type":"run","model":7,"ranks":"x"})");
  for (const char* line : {"", "{", R"({"type":"waits","waited_s":[[1,2],[3]]})",
                           R"({"type":"waits","waited_s":[1]})", R"({"type":"waits","waited_s":[["a"]]})",
                           R"({"type":"step","step":"x","loss":null})", R"({"type":7})"}) {
    run.read(line);
    EXPECT_FALSE(run.text().empty());
    EXPECT_FALSE(run.metrics().empty());
  }
}

TEST(WaitHistory, RestartsWhenTheRunIsResumedOrTheWorldChanges) {
  WaitHistory history;
  for (int second : {0, 1, 2}) history.add(after(second, 0, 0.5));
  ASSERT_TRUE(history.finding());
  EXPECT_EQ(history.finding()->straggler.rank, 0);
  history.add(after(1, 0, 0.5));  // a new process counts from 0
  EXPECT_FALSE(history.finding());
  EXPECT_TRUE(history.recent_waits().empty());
  history.add(after(2, 0, 0.5));
  EXPECT_TRUE(history.finding());
  history.add({.step = 300, .seconds = 9, .waited_s = {{0, 1}, {2, 0}}});
  EXPECT_FALSE(history.finding());
}

}  // namespace
}  // namespace gradwire::testing
