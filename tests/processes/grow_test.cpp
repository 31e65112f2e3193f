// Tests of --elastic: new ranks join a run between two steps. All ranks have the same bits at the end.
// Joiners that are rejected or die are reported and do not affect the run.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <thread>

#include "collectives/net/quorum.h"
#include "tests/processes/elastic_runs.h"
#include "tests/support/expect.h"
#include "trainer/checkpoint/folder.h"

namespace gradwire {
namespace {

using nlohmann::json;
using namespace testing;
using namespace std::chrono_literals;

TEST(Grow, FromFourToThreeToTwoToFourRanksWithCheckpointsThatLoad) {
  for (const auto& [spec, graph] : {std::pair("powersgd:rank=2", "off"), std::pair("int8", "on")}) {
    SCOPED_TRACE(spec);
    const Trained trained = train({.spec = spec,
                                   .fates = "5 3 kill 9 0 kill 13 4 join 13 5 join",
                                   .checkpoints = "on",
                                   .graph = graph,
                                   .steps = 60,
                                   .most = 4},
                                  {0, 3});
    expect_steps(trained);
    EXPECT_EQ(trained.lost(), (std::vector<int>{3, 0}));
    EXPECT_EQ(trained.joined(), (std::vector<int>{4, 5}));
    ASSERT_FALSE(trained.records("grow").empty());
    const json last = trained.records("grow").back();
    EXPECT_EQ(last["ranks"], (json{1, 2, 4, 5}));
    EXPECT_EQ(last["global_batch"], 32);
    // Rank 0 compares all ranks' weights at the end.
    EXPECT_EQ(lines_with("end: ", trained.ranks[1].output).size(), 1u);
    EXPECT_EQ(checkpoint_world(trained.checkpoint(12)), 2);
    expect_checkpoints(trained, 4, tiny_run(4, spec, trained.steps), trained.steps - 2 * kCheckpointEvery);
  }
}

// Compares a run with joiners with a run without joiners. FP32 has no residuals, and a step has the same
// images in both runs, so the step's losses are equal up to the order of additions.
TEST(Grow, WithoutCompressionLossesMatchARunWithoutJoiners) {
  const std::vector<double> whole = undisturbed_losses(tiny_run(2, "fp32", 40));
  const Trained trained = train({.spec = "fp32", .fates = "4 2 join 8 3 join", .world = 2, .steps = 40}, {});
  expect_steps(trained);
  EXPECT_EQ(trained.joined(), (std::vector<int>{2, 3}));
  expect_losses(trained, whole);
}

// Lets ranks join a run of one rank. The single rank has no residuals and sends no data; with joiners, it has
// residuals and sends data again. Then the rank dies, and a joiner becomes rank 0.
TEST(Grow, JoinersExtendAndSucceedALoneRank) {
  const Trained trained = train(
      {.spec = "powersgd:rank=2", .fates = "3 1 kill 6 2 join 6 3 join 30 0 kill", .world = 2, .steps = 60},
      {0, 1});
  expect_steps(trained);
  EXPECT_EQ(trained.joined(), (std::vector<int>{2, 3}));
  EXPECT_EQ(trained.lost(), (std::vector<int>{1, 0}));
  // Rank numbers follow the order of joining, so either process may be rank 0.
  EXPECT_EQ(lines_with("end: ", trained.ranks[2].output + trained.ranks[3].output).size(), 1u);
}

// Checks that joiners read their part of the state from a checkpoint that the group writes for them.
TEST(Grow, ShardedRunsReshardTheirState) {
  const std::vector<double> whole = undisturbed_losses(tiny_run(2, "fp32", 50));
  const Trained trained = train({.spec = "fp32",
                                 .fates = "5 2 join 5 3 join 30 0 kill",
                                 .world = 2,
                                 .checkpoints = "on",
                                 .shard_optimizer = true,
                                 .steps = 50},
                                {0});
  EXPECT_EQ(trained.joined(), (std::vector<int>{2, 3}));
  EXPECT_EQ(trained.lost(), (std::vector<int>{0}));
  EXPECT_EQ(checkpoint_world(trained.checkpoint(28)), 4);
  EXPECT_EQ(trained.steps_of("step"), every_step(50));
  expect_losses(trained, whole);
}

TEST(Grow, KeepLocalGivesJoinersABatchAndRaisesTheLearningRate) {
  const Trained trained = train({.fates = "4 2 join", .world = 2, .batch = "keep-local", .steps = 30}, {});
  expect_steps(trained);
  const json record = trained.records("grow").at(0);
  EXPECT_EQ(record["global_batch"], 24);
  EXPECT_DOUBLE_EQ(record["lr"].get<double>(), 1.5e-2);
}

TEST(Grow, RejectsSurplusJoinersAndOtherSettingsByName) {
  const Trained full = train({.fates = "4 2 join", .world = 2, .steps = 200, .most = 2, .refused = {2}}, {});
  EXPECT_EQ(full.ranks[2].exit_code, 2);
  expect_has(full.ranks[2].output, {"there are 2 ranks, and at most 2 are allowed"});
  EXPECT_TRUE(full.joined().empty());
  const Trained other = train({.fates = "4 2 join", .world = 2, .steps = 200, .refused = {2}}, {});
  EXPECT_EQ(other.ranks[2].exit_code, 2);
  for (const size_t r : {size_t{0}, size_t{2}}) {
    expect_has(other.ranks[r].output, {"\"weight_decay\": 0.125 there, "});
  }
  EXPECT_TRUE(other.joined().empty());
}

TEST(Grow, JoinersThatDieOrStopCostTheRunNoRankAndNoStep) {
  for (const char* what : {"join-dies", "join-stops", "join-stops-waiting", "join-dies-inside"}) {
    const Trained trained = train(
        {.spec = "powersgd:rank=2", .fates = fmt::format("4 2 {} 10 3 join", what), .world = 2, .steps = 40},
        {2});
    expect_steps(trained);
    EXPECT_EQ(trained.joined(), (std::vector<int>{2})) << "the number of the first process that joins";
    EXPECT_TRUE(trained.lost().empty());
    EXPECT_EQ(lines_with("end: ", trained.ranks[0].output).size(), 1u);
    // The other ranks detect a dead joiner by its closed connection, and a stopped joiner by the deadline.
    const std::vector<std::string> notes =
        lines_with("gradwire: no new rank has joined; the group continues: ", trained.ranks[0].output);
    const bool forms = std::string(what) == "join-dies" || std::string(what) == "join-stops";
    ASSERT_EQ(notes.size(), forms ? 1u : 0u) << what << ": " << trained.ranks[0].output;
    if (!forms) continue;
    const bool at_once = notes[0].find("the process that was to become rank 2 is gone") != std::string::npos;
    EXPECT_EQ(at_once, std::string(what) == "join-dies") << notes[0];
  }
}

TEST(Grow, RejectsJoinersWithoutTheSecretAndLogsTheirAddress) {
  const Trained trained = train({.fates = "4 2 join-guesses", .world = 2, .steps = 200, .refused = {2}}, {});
  EXPECT_EQ(trained.ranks[2].exit_code, 3);
  expect_has(trained.ranks[2].output, {"give it the run's GRADWIRE_SECRET"});
  EXPECT_TRUE(trained.joined().empty());
  const std::vector<std::string> named =
      lines_with("gradwire: rank 0 rejected a connection from ", trained.ranks[0].output);
  ASSERT_FALSE(named.empty()) << trained.ranks[0].output;
  EXPECT_TRUE(named[0].ends_with(": wrong secret")) << named[0];
}

// Kills launched ranks at any time, including while other ranks join. GRADWIRE_FULL_SWEEPS: more runs.
TEST(Grow, CompletesWhenRanksDieWhileOthersJoin) {
  const int runs = random_runs(2);
  for (int run = 0; run < runs; ++run) {
    std::mt19937 random(static_cast<uint32_t>(run));
    const int launched = 2 + static_cast<int>(random() % 2), joins = 1 + static_cast<int>(random() % 2);
    const int spared = static_cast<int>(random() % static_cast<uint32_t>(launched));
    std::string fates;
    std::set<int> dead;
    for (int rank = 0; rank < launched; ++rank) {
      if (rank == spared) continue;
      fates += fmt::format("{} {} soon ", 3 + random() % 4, rank);
      dead.insert(rank);
    }
    for (int i = 0; i < joins; ++i) fates += fmt::format("{} {} join ", 2 + random() % 4, launched + i);
    const bool divided = random() % 2 == 0, checkpoints = divided || random() % 2 == 0;
    SCOPED_TRACE(fmt::format("{}, {}", fates, divided ? "divided" : "whole"));
    const Trained trained = train({.spec = run % 2 == 0 ? "int8" : "powersgd:rank=2",
                                   .fates = fates,
                                   .world = launched,
                                   .checkpoints = checkpoints ? "on" : "off",
                                   .shard_optimizer = divided,
                                   .steps = 80},
                                  dead);
    expect_steps(trained);
    const std::vector<int> lost = trained.lost();
    EXPECT_EQ(std::set<int>(lost.begin(), lost.end()), dead);
    EXPECT_EQ(trained.joined().size(), static_cast<size_t>(joins));
  }
}

// Checks regrouping after a rank dies while the group has grown for some ranks but not for other ranks.
TEST(Quorum, RanksThatLearnLateOfGrowthFollow) {
  std::vector<std::unique_ptr<Quorum>> ranks;
  std::vector<std::string> contacts;
  for (int r = 0; r < 4; ++r) {
    ranks.push_back(std::make_unique<Quorum>("127.0.0.1", "a secret"));
    contacts.push_back(ranks.back()->contact());
  }
  const std::vector<std::string> before(contacts.begin(), contacts.end() - 1);
  const auto ignore = [](const std::string&) {};
  for (int r = 0; r < 3; ++r) ranks[r]->enter(r, before, ignore);
  ranks[3]->begin(1, "grown");
  ranks[3]->enter(3, contacts, ignore);
  for (const int r : {0, 1}) {
    ranks[r]->adopt({.ranks = {0, 1, 2}, .name = "grown", .location = "a location", .joined = {contacts[3]}});
    ranks[r]->enter(r, contacts, ignore);
  }
  const Quorum::NextGroup told = ranks[2]->regroup(5s);
  EXPECT_EQ(told.ranks, (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(told.joined, std::vector<std::string>{contacts[3]});
  ranks[0].reset();
  std::vector<std::vector<int>> left(4);
  std::vector<std::thread> threads;
  for (size_t r = 1; r < 4; ++r) {
    threads.emplace_back([&, r] {
      const Quorum::NextGroup found = ranks[r]->regroup(10s);
      if (found.location.empty()) ranks[r]->publish(found, "a location");
      left[r] = found.ranks;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t r = 1; r < 4; ++r) EXPECT_EQ(left[r], (std::vector<int>{1, 2, 3})) << r;
}

}  // namespace
}  // namespace gradwire
