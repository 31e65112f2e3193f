// schedule=auto: the planner's choice for given link costs, the same choice on every rank, and the reason for
// the choice.
#include "collectives/plan/planner.h"

#include <gtest/gtest.h>

#include "collectives/agreement/statements.h"
#include "collectives/communicator/communicator.h"
#include "collectives/program/program.h"
#include "collectives/reducer/reducer.h"
#include "collectives/transport/local/local.h"
#include "runtime/util/error.h"
#include "tests/collectives/group.h"
#include "tests/support/expect.h"

namespace gradwire {
namespace {

using namespace std::chrono_literals;

using Pattern = LinkCosts::Pattern;

SchedulePlanner::Choice choose(const std::string& spec, int world, int per_node, const LinkCosts& costs,
                               int64_t count, Wire wire) {
  return SchedulePlanner(CompressionSpec::parse(spec), Collective::allreduce, world, per_node, costs,
                         kSliceBytes)
      .choose(count, wire);
}
ScheduleKind chosen(const std::string& spec, int world, int per_node, const LinkCosts& costs, int64_t count,
                    Wire wire) {
  return choose(spec, world, per_node, costs, count, wire).schedule.kind;
}

LinkCosts same_everywhere(Pattern pattern) {
  LinkCosts costs;
  costs.neighbour = costs.all_pairs = costs.intra_node = costs.inter_node = pattern;
  return costs;
}

constexpr int64_t kLittle = 1000, kMuch = 25'000'000 / 4;

TEST(Planner, TwoShotWhereLinksAreEqual) {
  for (int world : {3, 4, 8, 64}) {
    for (Wire wire : {kFp32, kBf16}) {
      for (int64_t count : {int64_t{0}, kLittle, kMuch}) {
        for (Pattern p : {Pattern{5, 50'000}, Pattern{50, 125}, Pattern{2000, 1000}}) {
          EXPECT_EQ(chosen("bf16", world, 0, same_everywhere(p), count, wire), ScheduleKind::two_shot)
              << world << " " << count;
        }
      }
    }
  }
}

// Tests an oversubscribed network, in which all pairs at once have much less bandwidth than neighbours.
TEST(Planner, RingWhereManyPairsAtOnceAreSlow) {
  LinkCosts costs = same_everywhere({50, 1000});
  costs.all_pairs = {50, 250};
  EXPECT_EQ(chosen("fp32", 8, 0, costs, kMuch, kFp32), ScheduleKind::ring);
  EXPECT_EQ(chosen("fp32", 8, 0, costs, kLittle, kFp32), ScheduleKind::two_shot);
}

// Tests few bytes over a switch, where every message costs its full latency.
TEST(Planner, TreeWhereManyMessagesAreSlowAndBytesAreFew) {
  LinkCosts costs = same_everywhere({20, 4000});
  costs.all_pairs = {20 * 63, 4000};
  EXPECT_EQ(chosen("fp32", 64, 0, costs, kLittle, kFp32), ScheduleKind::tree);
}

TEST(Planner, HierarchicalWhereNodesAreKnownAndSlowLinksAreShared) {
  LinkCosts costs;
  costs.measured = true;
  costs.intra_node = {10, 20'000};
  costs.inter_node = {50, 1000};
  costs.all_pairs = {200, 600};
  costs.neighbour = {50, 1000};
  EXPECT_EQ(chosen("bf16", 16, 4, costs, kMuch, kBf16), ScheduleKind::hierarchical);
  // The planner does not choose a hierarchical schedule for unknown nodes, for nodes of one rank, or for a
  // single node.
  for (int per_node : {0, 1, 16}) {
    EXPECT_NE(chosen("bf16", 16, per_node, costs, kMuch, kBf16), ScheduleKind::hierarchical);
  }
}

// Tests links on which a ring is faster by half but rounds 16 times. The planner chooses a ring for FP32 but
// not for a wire that rounds.
TEST(Planner, PenalizesRoundingErrors) {
  LinkCosts costs = same_everywhere({1, 1000});
  costs.all_pairs = {1, 500};
  EXPECT_EQ(chosen("fp32", 16, 0, costs, kMuch, kFp32), ScheduleKind::ring);
  auto lossy = choose("bf16", 16, 0, costs, kMuch, kBf16);
  EXPECT_EQ(lossy.schedule.kind, ScheduleKind::two_shot);
  testing::expect_has(lossy.reason, {"2 lossy steps; ring is faster but has 16"});
  // Much slower links between all pairs outweigh the rounding errors.
  costs.all_pairs = {1, 100};
  EXPECT_NE(chosen("bf16", 16, 0, costs, kMuch, kBf16), ScheduleKind::two_shot);
}

TEST(Planner, IgnoresMeasurementNoise) {
  for (double noise : {0.9, 1.0, 1.1}) {
    LinkCosts costs = same_everywhere({50, 1000});
    costs.all_pairs = {50 * noise, 1000 / noise};
    EXPECT_EQ(chosen("fp32", 4, 0, costs, kMuch, kFp32), ScheduleKind::two_shot);
  }
}

TEST(Planner, ExplainsItsChoiceInEveryWorld) {
  auto choice = choose("fp32", 4, 0, same_everywhere({100, 1000}), 1'000'000, kFp32);
  // The prediction is two rounds of 100 us, and 6 MB (2 * 3/4 of 4 MB) at 1 GB/s.
  EXPECT_NEAR(choice.predicted_us, 6200, 1);
  EXPECT_TRUE(choice.reason.starts_with("fastest: 6.2 ms predicted, ring 6.6 ms, tree ")) << choice.reason;
  EXPECT_EQ(choose("fp32:schedule=tree", 4, 0, {}, 100, kFp32).reason, "requested");
  EXPECT_EQ(chosen("fp32", 100, 0, {}, kMuch, kFp32), ScheduleKind::ring);  // too many ranks for a two-shot
  EXPECT_EQ(chosen("fp32", 2, 0, {}, kMuch, kFp32), ScheduleKind::two_shot);
  EXPECT_EQ(choose("fp32", 1, 0, {}, kMuch, kFp32).reason, "a world of 1");
  EXPECT_THROW(choose("fp32:schedule=hierarchical", 4, 0, {}, 1, kFp32), BadInput);
}

SchedulePlanner::Choice choose_for(Collective collective, int world, int per_node, const LinkCosts& costs,
                                   int64_t count, const Shards& shards = {}) {
  return SchedulePlanner(CompressionSpec(), collective, world, per_node, costs, kSliceBytes)
      .choose(count, kFp32, shards);
}

TEST(Planner, CostsFollowTheShards) {
  const LinkCosts costs = same_everywhere({100, 1000});
  const auto even = choose_for(Collective::reduce_scatter, 4, 0, costs, 1'000'000);
  const auto same =
      choose_for(Collective::reduce_scatter, 4, 0, costs, 1'000'000, {250'000, 250'000, 250'000, 250'000});
  EXPECT_NEAR(same.predicted_us, even.predicted_us, 1);
  // Even shards take one round of 100 us, and 3 MB (3/4 of 4 MB) at 1 GB/s. With all elements on one rank,
  // that rank receives 12 MB: 4 MB from each other rank, in two slices.
  EXPECT_NEAR(even.predicted_us, 3100, 1);
  EXPECT_NEAR(SchedulePlanner(CompressionSpec::parse("fp32:schedule=two_shot"), Collective::reduce_scatter, 4,
                              0, costs, kSliceBytes)
                  .choose(1'000'000, kFp32, {0, 0, 1'000'000, 0})
                  .predicted_us,
              12200, 1);
  // The planner never chooses a tree for shards, because a tree does not have even halves.
  LinkCosts little = same_everywhere({20, 4000});
  little.all_pairs = {20 * 63, 4000};
  EXPECT_NE(choose_for(Collective::all_gather, 64, 0, little, 640, Shards(64, 10)).schedule.kind,
            ScheduleKind::tree);
}

TEST(Planner, ChoosesBroadcastsByTheSameModel) {
  LinkCosts costs = same_everywhere({50, 1000});
  const auto choice = choose_for(Collective::broadcast, 8, 0, costs, kMuch);
  EXPECT_EQ(choice.schedule.collective, Collective::broadcast);
  EXPECT_EQ(choice.schedule.kind, ScheduleKind::two_shot);
  costs.all_pairs = {50, 100};
  EXPECT_EQ(choose_for(Collective::broadcast, 8, 0, costs, kMuch).schedule.kind, ScheduleKind::ring);
  EXPECT_EQ(choose_for(Collective::broadcast, 100, 0, costs, kMuch).schedule.kind, ScheduleKind::ring);
  EXPECT_EQ(choose_for(Collective::broadcast, 1, 0, costs, kMuch).schedule.world, 1);
}

TEST(Planner, EveryRankMeasuresTheSameNumbers) {
  for (int per_node : {0, 2}) {
    std::vector<LinkCosts> costs(4);
    testing::run_ranks(4, Device::host(), [&](Communicator& comm) {
      Stream stream = Stream::create(comm.device(), "test");
      costs[comm.rank()] = measure_link_costs(comm.transport(), stream, per_node, 1s);
    });
    for (const LinkCosts& c : costs) {
      EXPECT_EQ(c, costs[0]);
      EXPECT_TRUE(c.measured);
      for (const Pattern& p : {c.neighbour, c.all_pairs, c.intra_node, c.inter_node}) {
        EXPECT_GT(p.latency_us, 0);
        EXPECT_GT(p.bytes_per_us, 0);
      }
      EXPECT_EQ(c.intra_node == c.all_pairs, per_node == 0);
    }
  }
}

// How many rounds fit into the time depends on the machine. So the test checks only what holds on each
// machine: a pattern sends at most 32 times the limit, and its small messages take less than 128 KiB.
TEST(Planner, MeasuresWithAtMostItsLimitOfBytesTheSameOnAllRanks) {
  for (size_t limit : {size_t{4} << 10, size_t{64} << 10, size_t{8} << 20}) {
    std::vector<uint64_t> sent(3);
    testing::run_ranks(3, Device::host(), [&](Communicator& comm) {
      Stream stream = Stream::create(comm.device(), "test");
      measure_link_costs(comm.transport(), stream, 0, 1s, limit);
      sent[comm.rank()] = comm.bytes_sent();
    });
    for (uint64_t bytes : sent) EXPECT_EQ(bytes, sent[0]);
    EXPECT_GT(sent[0], 0);
    EXPECT_LT(sent[0], 2 * 32 * limit + (128 << 10));
  }
}

// Returns ranks that measure their links, unlike other ranks that are threads.
std::vector<std::unique_ptr<Communicator>> measuring_ranks(int world, std::chrono::milliseconds timeout,
                                                           const EmulatedLink& link = {}) {
  std::vector<std::unique_ptr<Communicator>> group;
  for (auto& transport : make_local_transports(std::vector<Device>(world, Device::host()), timeout, link)) {
    group.push_back(std::make_unique<Communicator>(std::move(transport)));
  }
  return group;
}

// The bounds are 1.5 times what the link passes in 0.3 s, or in 5 % of the timeout. A busy machine sends
// less.
TEST(Planner, SlowLinksEndTheMeasurementAfterFewBytes) {
  const EmulatedLink link = EmulatedLink::parse("2Mbit");
  for (const auto& [timeout, seconds] : {std::pair{60s, 0.3}, std::pair{2s, 0.1}}) {
    run_local_ranks(measuring_ranks(4, timeout, link), [&,
                                                        most = 1.5 * seconds * 2e6 / 8](Communicator& comm) {
      EXPECT_TRUE(comm.link_costs(Stream::create(comm.device(), "test"), ScheduleKind::automatic).measured);
      EXPECT_LT(static_cast<double>(comm.bytes_sent()), most);
    });
  }
}

TEST(Planner, MeasuresTheRateOfSlowLinks) {
  run_local_ranks(measuring_ranks(3, 60s, EmulatedLink::parse("2Mbit")), [&](Communicator& comm) {
    const Stream stream = Stream::create(comm.device(), "test");
    const LinkCosts costs = measure_link_costs(comm.transport(), stream, 0, 1s);
    for (const Pattern& p : {costs.neighbour, costs.all_pairs}) {
      EXPECT_LT(p.bytes_per_us, 0.5) << "the link passes 0.24";
    }
  });
}

TEST(Planner, OnlyAChoiceMeasuresLinks) {
  for (int world : {2, 3}) {
    run_local_ranks(measuring_ranks(world, 60s), [&](Communicator& comm) {
      for (const char* spec : {"int8:schedule=ring", "int8:schedule=two_shot", "int8"}) {
        const Reducer reducer(comm, CompressionSpec::parse(spec), {{"tensor", {1 << 20}}}, {});
        EXPECT_EQ(comm.bytes_sent() > 0, world == 3 && spec == std::string("int8")) << spec;
      }
    });
  }
}

// Expects the ranks of a new group to measure unless all of them know the same costs.
TEST(Planner, GroupsThatFollowKeepTheCostsThatAllRanksKnow) {
  LinkCosts known = same_everywhere({123, 456});
  known.measured = true;
  for (int knowing : {4, 3, 0}) {
    for (int world : {4, 3}) {
      run_local_ranks(measuring_ranks(4, 60s), [&](Communicator& comm) {
        if (comm.rank() < knowing) comm.set_link_costs(known);
        const auto next = comm.split(comm.rank() < world ? 0 : -1, -comm.rank());
        if (next == nullptr) return;
        const Stream stream = Stream::create(comm.device(), "test");
        EXPECT_EQ(next->link_costs(stream, ScheduleKind::automatic) == known, knowing == 4 && world == 4);
        EXPECT_EQ(next->bytes_sent() < 10'000, knowing == 4 && world == 4);
        const LinkCosts& costs = next->link_costs(stream, ScheduleKind::automatic);
        for (const double latency :
             all_gather_value(next->transport(), stream, costs.neighbour.latency_us, "latencies")) {
          EXPECT_EQ(latency, costs.neighbour.latency_us);
        }
      });
    }
  }
}

// Expects a schedule for the size of each allreduce. The reducer reports the choice and the reason.
TEST(Planner, AReducerChoosesForEachAllreduce) {
  LinkCosts costs = same_everywhere({20, 4000});
  costs.all_pairs = {300, 4000};  // many messages at once are fast only for large buckets
  costs.measured = true;
  testing::run_ranks(8, Device::host(), [&](Communicator& comm) {
    comm.set_link_costs(costs);
    Reducer reducer(comm, CompressionSpec::parse("fp32"), {{"small", {4, 1}}, {"large", {1 << 20}}},
                    {.bucket_bytes = 1});
    EXPECT_EQ(reducer.schedule(), "tree+two_shot");
    testing::expect_has(reducer.schedule_reason(),
                        {"schedule two_shot (2.44 ms predicted, within 20 % of the fastest, ring",
                         "links measured: to a neighbour 20 us and 4 GB/s, to all 300 us"});
    testing::expect_has(reducer.describe(), {"schedule tree"});
    Reducer fixed(comm, CompressionSpec::parse("fp32:schedule=ring"), {{"small", {4}}}, {});
    EXPECT_EQ(fixed.schedule(), "ring");
    EXPECT_EQ(fixed.schedule_reason(), "schedule ring (requested)");
  });
}

}  // namespace
}  // namespace gradwire
