// Tests of --elastic: processes are killed or stopped while they train. The other processes continue with
// identical bits.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <set>

#include "tests/processes/elastic_runs.h"
#include "tests/support/expect.h"

namespace gradwire {
namespace {

using nlohmann::json;
using namespace testing;
using namespace std::chrono_literals;

constexpr int64_t kSteps = 24;

TEST(Elastic, FromFourToThreeToTwoRanksWithACheckpointThatLoads) {
  for (const auto& [spec, graph] : {std::pair("powersgd:rank=2", "off"), std::pair("int8", "on")}) {
    SCOPED_TRACE(spec);
    const Trained trained =
        train({.spec = spec, .fates = "6 3 kill 14 1 kill", .checkpoints = "on", .graph = graph}, {1, 3});
    expect_steps(trained);
    EXPECT_EQ(trained.lost(), (std::vector<int>{3, 1}));
    for (const json& record : trained.records("shrink")) {
      for (const json& norm : record["lost_residual_norms"]) EXPECT_GT(norm.get<double>(), 0);
      EXPECT_EQ(record["global_batch"], 32);
    }
    // Rank 0 compares all ranks' weights at the end.
    EXPECT_EQ(lines_with("end: ", trained.ranks[0].output).size(), 1u);
    expect_checkpoints(trained, 2, tiny_run(3, spec), 12);
  }
}

TEST(Elastic, AnotherRankTakesThePlaceOfRankZero) {
  const Trained trained = train({.fates = "5 0 kill 13 1 kill 17 3 kill", .checkpoints = "on"}, {0, 1, 3});
  expect_steps(trained);
  EXPECT_EQ(trained.lost(), (std::vector<int>{0, 1, 3}));
  EXPECT_EQ(trained.log[0]["type"], "run");
  EXPECT_EQ(trained.records("run").size(), 1u);
  EXPECT_EQ(lines_with("end: ", trained.ranks[2].output).size(), 1u);
  EXPECT_EQ(trained.steps_of("eval"), (std::vector<int64_t>{6, 12, 18, 24}));
  expect_checkpoints(trained, 1, tiny_run(3, "int8"), 12);
}

// Compares a run that loses ranks with a run that keeps all ranks. FP32 has no residuals, and a step has the
// same images in both runs, so the step's losses are equal up to the order of additions.
TEST(Elastic, WithoutCompressionARunThatLosesRanksTrainsLikeOneThatLosesNone) {
  const std::vector<double> whole = undisturbed_losses(tiny_run(4, "fp32"));
  const Trained trained = train({.spec = "fp32", .fates = "4 2 kill 9 0 kill"}, {0, 2});
  expect_steps(trained);
  expect_losses(trained, whole);
}

TEST(Elastic, KeepLocalKeepsEachRanksBatchAndLowersTheLearningRate) {
  const Trained trained = train({.fates = "4 3 kill", .batch = "keep-local"}, {3});
  expect_steps(trained);
  const json record = trained.records("shrink").at(0);
  EXPECT_EQ(record["global_batch"], 24);
  EXPECT_DOUBLE_EQ(record["lr"].get<double>(), 0.75e-2);
}

TEST(Elastic, AStoppedRankIsLeftBehindAfterTheDeadline) {
  for (const int who : {0, 2}) {
    const Trained trained = train(
        {.fates = fmt::format("5 {} stop", who), .world = 3, .checkpoints = "on", .timeout = 3s}, {who});
    expect_steps(trained);
    EXPECT_EQ(trained.lost(), (std::vector<int>{who}));
  }
}

// Kills ranks at random times. GRADWIRE_FULL_SWEEPS: more runs.
TEST(Elastic, RanksKilledAtAnyTimeLeaveARunThatEndsInGoodOrder) {
  const int runs = random_runs(3);
  const char* specs[] = {"int8", "powersgd:rank=2", "fp32"};
  for (int run = 0; run < runs; ++run) {
    std::mt19937 random(static_cast<uint32_t>(run));
    const int world = 3 + static_cast<int>(random() % 2);
    std::vector<int> order(world);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    const size_t deaths = 1 + random() % static_cast<size_t>(world - 1);
    std::string fates;
    std::set<int> lost;
    for (size_t i = 0; i < deaths; ++i) {
      fates += fmt::format("{} {} soon ", random() % (kSteps - 6), order[i]);
      lost.insert(order[i]);
    }
    const bool sharded = random() % 2 == 0;
    const bool checkpoints = sharded || random() % 2 == 0;
    SCOPED_TRACE(fmt::format("{}, {}", fates, sharded ? "sharded" : "whole"));
    const Trained trained = train({.spec = specs[run % 3],
                                   .fates = fates,
                                   .world = world,
                                   .batch = random() % 2 == 0 ? "keep-global" : "keep-local",
                                   .checkpoints = checkpoints ? "on" : "off",
                                   .shard_optimizer = sharded},
                                  lost);
    expect_steps(trained);
    const std::vector<int> told = trained.lost();
    EXPECT_EQ(std::set<int>(told.begin(), told.end()), lost);
    EXPECT_EQ(told.size(), lost.size());
  }
}

// Checks the replay of steps. A lost rank's part of a sharded state exists only in the newest checkpoint, so
// the steps since that checkpoint are repeated. With FP32 and the same images per step, the losses are equal.
TEST(Elastic, ShardedRunsReplayFromTheNewestCheckpointOrTheBeginning) {
  const std::vector<double> whole = undisturbed_losses(tiny_run(4, "fp32"));
  const Trained trained = train(
      {.spec = "fp32", .fates = "1 3 kill 10 0 kill 17 2 kill", .checkpoints = "on", .shard_optimizer = true},
      {0, 2, 3});
  EXPECT_EQ(trained.lost(), (std::vector<int>{3, 0, 2}));
  EXPECT_EQ(lines_with("end: ", trained.ranks[1].output).size(), 1u);
  EXPECT_EQ(trained.steps_of("shrink"), (std::vector<int64_t>{0, 8, 16}));
  EXPECT_EQ(trained.steps_of("step"), every_step(kSteps));
  expect_losses(trained, whole);
  EXPECT_EQ(trained.steps_of("eval"), (std::vector<int64_t>{6, 12, 18, 24}));
}

// Checks the residuals. The residuals of dead ranks are in the checkpoint, so no residual is lost.
TEST(Elastic, ShardedRunsLoseNoResiduals) {
  for (const char* spec : {"int8", "powersgd:rank=2"}) {
    SCOPED_TRACE(spec);
    const Trained trained = train(
        {.spec = spec, .fates = "6 3 kill 14 1 kill", .checkpoints = "on", .shard_optimizer = true}, {1, 3});
    EXPECT_EQ(trained.lost(), (std::vector<int>{3, 1}));
    for (const json& record : trained.records("shrink")) {
      for (const json& norm : record["lost_residual_norms"]) EXPECT_EQ(norm, 0.0);
    }
    EXPECT_EQ(trained.records("step").size(), static_cast<size_t>(kSteps));
    EXPECT_EQ(lines_with("end: ", trained.ranks[0].output).size(), 1u);
  }
}

TEST(Elastic, FewerThanTheLeastEndWithAnErrorThatSaysSo) {
  const Trained trained = train({.fates = "5 1 kill", .world = 3, .least = 3, .checkpoints = "on"}, {});
  for (const size_t r : {size_t{0}, size_t{2}}) {
    EXPECT_EQ(trained.ranks[r].exit_code, 4);
    expect_has(trained.ranks[r].output,
               {"2 of 3 ranks are left (lost: 1), fewer than the 3 that --elastic 3:3 asks for",
                "/saved --resume "});
  }
}

}  // namespace
}  // namespace gradwire
