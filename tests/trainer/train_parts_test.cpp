// Parts of the training loop without a run: the order of exchanges, the learning rate, hashes, reports.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <numeric>
#include <thread>
#include <vector>

#include "runtime/util/error.h"
#include "tests/support/expect.h"
#include "trainer/train/deferred_update.h"
#include "trainer/train/optimizer_state.h"
#include "trainer/train/run.h"
#include "trainer/train/run_reporter.h"

namespace gradwire::testing {
namespace {

// Checks the order of five buckets. The link sends a bucket as soon as it is full if the link is free, and
// then the other buckets from last to first.
TEST(ExchangeOrder, SendsTheFullBucketThatForwardNeedsFirst) {
  std::vector<BucketRange> buckets;
  for (int b = 0; b < 5; ++b) buckets.push_back({b, b + 1, 100 * b, 100 * (b + 1)});
  using Order = std::vector<int>;
  EXPECT_EQ(exchange_order(buckets, 0.0), (Order{4, 3, 2, 1, 0}));  // all buckets are full at the start
  // The other buckets follow after the first bucket.
  EXPECT_EQ(exchange_order(buckets, 0.1), (Order{0, 4, 3, 2, 1}));
  EXPECT_EQ(exchange_order(buckets, 0.3), (Order{0, 3, 4, 2, 1}));
  EXPECT_EQ(exchange_order(buckets, 0.6), (Order{0, 1, 3, 4, 2}));
  EXPECT_EQ(exchange_order(buckets, 1.0), (Order{0, 1, 2, 3, 4}));
  EXPECT_EQ(exchange_order(buckets, 7), (Order{0, 1, 2, 3, 4}));
  EXPECT_EQ(exchange_order({}, 0.5), Order{});
}

TEST(LearningRate, WarmsUpThenFollowsHalfACosine) {
  TrainConfig c;
  c.lr = 2.0;
  c.warmup_steps = 4;
  c.steps = 104;
  EXPECT_DOUBLE_EQ(learning_rate(c, 0), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(c, 3), 2.0);
  EXPECT_DOUBLE_EQ(learning_rate(c, 4), 2.0);
  EXPECT_NEAR(learning_rate(c, 54), 1.0, 1e-12);
  EXPECT_NEAR(learning_rate(c, 104), 0.0, 1e-12);
  for (int64_t s = 5; s < 104; ++s) EXPECT_LT(learning_rate(c, s), learning_rate(c, s - 1));
  c.warmup_steps = c.steps;  // all steps are warm-up
  EXPECT_DOUBLE_EQ(learning_rate(c, 103), 2.0);
}

TEST(ParameterHash, SeesEveryBitAndTheOrder) {
  std::vector<float> values(100);
  std::iota(values.begin(), values.end(), 1.0f);
  const uint64_t hash = parameter_hash(values);
  std::vector<float> other = values;
  other[57] = std::nextafter(other[57], 1e9f);
  EXPECT_NE(parameter_hash(other), hash);
  other = values;
  std::swap(other[3], other[4]);
  EXPECT_NE(parameter_hash(other), hash);
  other = values;
  other[0] = -0.0f;
  std::vector<float> zero = values;
  zero[0] = 0.0f;
  EXPECT_NE(parameter_hash(other), parameter_hash(zero));
  EXPECT_EQ(hex(0x1f), "000000000000001f");
}

TEST(RankReports, RoundsKeepTheirOrderAndAbortEndsTheWait) {
  LocalRankReports reports(2, std::chrono::seconds(60));
  reports.post(1, {.loss = 10});
  reports.post(1, {.loss = 20});
  reports.post(0, {.loss = 1});
  reports.post(0, {.loss = 2});
  EXPECT_EQ(reports.collect()[1].loss, 10);
  std::vector<RankReports::Report> second = reports.collect();
  EXPECT_EQ(second[0].loss, 2);
  EXPECT_EQ(second[1].loss, 20);
  std::thread aborter([&] { reports.abort("rank 1 failed"); });
  EXPECT_EQ(expect_error<CommError>([&] { reports.collect(); }, {}), "rank 1 failed");
  aborter.join();
}

TEST(RankReports, NamesTheLateRank) {
  LocalRankReports reports(3, std::chrono::milliseconds(20));
  reports.post(0, {});
  reports.post(2, {});
  expect_error<CommError>([&] { reports.collect(); }, {"rank 1"});
}

}  // namespace
}  // namespace gradwire::testing
