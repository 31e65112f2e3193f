#include "collectives/schedule/schedule.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "collectives/schedule/checker.h"
#include "runtime/util/error.h"
#include "tests/collectives/schedule_interpreter.h"
#include "tests/support/expect.h"
#include "tests/support/schedules.h"

namespace gradwire::testing {
namespace {

#ifdef GRADWIRE_SANITIZED
constexpr int kMaxRanks = 24;  // fewer ranks, because sanitizer builds are ten times slower
#else
constexpr int kMaxRanks = 64;
#endif

void expect_proven(const Schedule& s, const std::string& what) {
  CheckReport report = check(s);
  EXPECT_TRUE(report.ok) << what << ":\n" << report.to_string();
  EXPECT_TRUE(report.correct) << what;
}

void expect_executes(const Schedule& s, uint64_t seed, const std::string& what) {
  EXPECT_EQ(Interpreter(s, seed).run(), std::nullopt) << what;
}

TEST(Schedule, AllreducesAndTheirHalvesAreCorrectForEveryWorldAndShape) {
  for (int n = 1; n <= kMaxRanks; ++n) {
    for (const Schedule& s : allreduces(n)) {
      const std::string what = fmt::format("{} of {} x {}", name(s.kind), s.nodes, s.per_node);
      const Schedule scatter = reduce_scatter(s), gather = all_gather(s);
      expect_proven(s, what);
      expect_proven(scatter, "reduce-scatter, " + what);
      expect_proven(gather, "all-gather, " + what);
      EXPECT_EQ(scatter.num_rounds() + gather.num_rounds(), s.num_rounds()) << what;
      if (n <= 40) expect_executes(s, 5, what);
      if (n > 12) continue;
      expect_executes(scatter, 3, what);
      expect_executes(gather, 4, what);
      expect_proven(pipelined(scatter, 3), "sliced reduce-scatter, " + what);
      expect_proven(pipelined(gather, 3), "sliced all-gather, " + what);
    }
  }
  EXPECT_THROW(reduce_scatter(all_gather(ring(3))), BadInput);
  EXPECT_THROW(all_gather(reduce_scatter(ring(3))), BadInput);
}

// Checks every world, with the first, the last and a middle rank as the root. Hierarchical broadcasts have
// every shape.
TEST(Schedule, BroadcastsAreCorrect) {
  for (int n = 1; n <= kMaxRanks; ++n) {
    for (int root : std::set<int>{0, n / 3, n - 1}) {
      std::vector<Schedule> all = {broadcast(ScheduleKind::ring, n, root),
                                   broadcast(ScheduleKind::two_shot, n, root)};
      for (int nodes = 1; nodes <= n; ++nodes) {
        if (n % nodes == 0) all.push_back(broadcast(ScheduleKind::hierarchical, n, root, {.nodes = nodes}));
      }
      for (const Schedule& s : all) {
        const std::string what =
            fmt::format("broadcast, {} of {} x {} from {}", name(s.kind), s.nodes, s.per_node, root);
        expect_proven(s, what);
        for (int k = 0; k < s.num_rounds(); ++k) {
          EXPECT_TRUE(std::any_of(s.rounds.begin(), s.rounds.end(),
                                  [&](const auto& rounds) { return !rounds[k].empty(); }))
              << what << ": round " << k << " is empty";
        }
        if (n == 1) {
          EXPECT_EQ(s.num_rounds(), 0);
        }
        if (n > 12) continue;
        expect_executes(s, 6, what);
        expect_proven(pipelined(s, 3), what + " in 3 slices");
      }
    }
  }
  EXPECT_THROW(broadcast(ScheduleKind::ring, 4, 4), BadInput);
  EXPECT_THROW(broadcast(ScheduleKind::ring, 4, -1), BadInput);
  EXPECT_THROW(broadcast(ScheduleKind::tree, 4, 0), BadInput);
  EXPECT_THROW(broadcast(ScheduleKind::hierarchical, 6, 0, {.nodes = 4}), BadInput);
  EXPECT_EQ(make_schedule(Collective::broadcast, ScheduleKind::ring, 4, {}, 2).owner,
            std::vector<int32_t>(4, 2));
  EXPECT_EQ(make_schedule(Collective::all_gather, ScheduleKind::ring, 4).collective, Collective::all_gather);
}

// Counts the bytes between nodes. A direct exchange between all ranks would send too many bytes: 8 times as
// many with 8 ranks per node.
TEST(Schedule, HierarchicalHalvesSendNoMoreBetweenNodesThanARing) {
  for (int nodes : {2, 3, 8}) {
    for (int per_node : {2, 4, 8}) {
      const int world = nodes * per_node;
      // Returns the bytes that leave a node, in units of the buffer size. Only the ranks at a node's ends
      // have ring neighbours in other nodes.
      auto leaves_a_node = [&](const Schedule& s) {
        double most = 0;
        for (int node = 0; node < nodes; ++node) {
          int64_t chunks = 0;
          for (int r = node * per_node; r < (node + 1) * per_node; ++r) {
            for (const Round& round : s.rounds[r]) {
              for (const Step& step : round) {
                chunks += step.kind == Step::Kind::send && step.peer / per_node != node ? 1 : 0;
              }
            }
          }
          most = std::max(most, static_cast<double>(chunks) / s.chunks);
        }
        return most;
      };
      for (Collective half : {Collective::reduce_scatter, Collective::all_gather}) {
        const Topology shape{.nodes = nodes, .per_node = per_node};
        const double layered = leaves_a_node(make_schedule(half, ScheduleKind::hierarchical, world, shape));
        const double in_a_ring = leaves_a_node(make_schedule(half, ScheduleKind::ring, world));
        const double direct = leaves_a_node(make_schedule(half, ScheduleKind::two_shot, world));
        EXPECT_LE(layered, in_a_ring) << nodes << " x " << per_node;
        EXPECT_NEAR(layered, (nodes - 1.0) / nodes, 1e-9);
        EXPECT_NEAR(direct, per_node * layered, 1e-9);
      }
    }
  }
}

TEST(Schedule, ChunksFollowShards) {
  const Shards shards = {100, 0, 7, 1000};
  for (const Schedule& s :
       {reduce_scatter(ring(4)), all_gather(pipelined(two_shot(4), 3)), reduce_scatter(hierarchical(2, 2))}) {
    const std::vector<ElementRange> ranges = chunk_ranges(s, 1107, shards);
    int64_t begin = 0;
    for (int r = 0; r < 4; ++r) {
      int64_t at = begin;
      for (int c = 0; c < s.chunks; ++c) {
        if (s.owner[c] != r) continue;
        EXPECT_EQ(ranges[c].begin, at);
        at = ranges[c].end;
      }
      begin += shards[r];
      EXPECT_EQ(at, begin) << "rank " << r;
      EXPECT_EQ(elements_owned(s, r, 1107, 8, shards), shards[r]);
    }
  }
  // In a two-shot, a rank sends to every other rank that rank's shard, or sends its own shard to all ranks.
  EXPECT_EQ(elements_sent(reduce_scatter(two_shot(4)), 3, 1107, shards), 107);
  EXPECT_EQ(elements_sent(all_gather(two_shot(4)), 3, 1107, shards), 3000);
}

TEST(Schedule, ShardsOfAllRanksCoverTheBuffer) {
  for (int n : {1, 2, 3, 5, 8, 64}) {
    for (const Schedule& s : {ring(n), double_tree(n), pipelined(two_shot(n), 3)}) {
      for (int64_t count : {0, 1, 7, 1000, 4099}) {
        int64_t owned = 0;
        for (int r = 0; r < n; ++r) owned += elements_owned(s, r, count, 128);
        EXPECT_EQ(owned, count) << name(s.kind) << " of " << n;
      }
      // Slices do not change the owners.
      for (int r = 0; r < n; ++r) {
        EXPECT_EQ(elements_owned(pipelined(s, 4), r, 12345), elements_owned(s, r, 12345));
      }
    }
  }
}

TEST(Schedule, SlicesOfACorrectScheduleAreCorrect) {
  for (int n : {1, 2, 3, 4, 5, 8, 13, 16, 39}) {
    for (int slices : {1, 2, 3, 8}) {
      for (const Schedule& s : allreduces(n)) {
        const Schedule sliced = pipelined(s, slices);
        const std::string what = fmt::format("{} of {} in {}", name(s.kind), n, slices);
        expect_proven(sliced, what);
        EXPECT_EQ(sliced.num_rounds(),
                  slices == 1 || s.num_rounds() == 0 ? s.num_rounds() : 2 * (s.num_rounds() - 1) + slices);
        expect_executes(sliced, 1, what);
      }
    }
  }
}

TEST(DoubleTree, EachRankIsInteriorInAtMostOneTree) {
  for (int n = 2; n <= kMaxRanks; ++n) {
    Schedule s = double_tree(n);
    for (int r = 0; r < n; ++r) {
      std::set<int> adds_in;
      for (const Round& round : s.rounds[r]) {
        for (const Step& step : round) {
          if (step.kind == Step::Kind::recv_reduce) adds_in.insert(step.chunk);
        }
      }
      EXPECT_LE(adds_in.size(), 1u) << "rank " << r << " of " << n;
    }
  }
}

TEST(DoubleTree, DepthIsLogarithmic) {
  for (int n = 1; n <= 1000; ++n) {
    int log2 = 0;
    while (2 << log2 <= n) ++log2;
    EXPECT_EQ(double_tree(n).num_rounds(), 2 * log2) << n;
  }
}

TEST(Hierarchical, SlowLinksCarryTheMinimumOfAnAllreduceBetweenNodes) {
  CheckReport report = check(hierarchical(4, 8));  // 32 chunks
  for (int r = 0; r < 32; ++r) {
    EXPECT_EQ(report.sent_inter_node[r], 2 * 3);      // chunks: 2 * 3/4 of 1/8 of the buffer
    EXPECT_EQ(report.sent_intra_node[r], 2 * 7 * 4);  // chunks: 2 * 7/8 of the buffer
  }
  EXPECT_EQ(report.lossy_steps, 3);
  EXPECT_EQ(report.inter_node_lossy_steps, 2);
}

TEST(Schedule, CountsLossySteps) {
  for (int n : {2, 7, 64}) {
    EXPECT_EQ(check(ring(n)).lossy_steps, n);
    EXPECT_EQ(check(two_shot(n)).lossy_steps, 2);
  }
  EXPECT_EQ(check(double_tree(64)).lossy_steps, 7);
  EXPECT_EQ(check(hierarchical(8, 8, ScheduleKind::ring)).lossy_steps, 9);
  EXPECT_EQ(check(hierarchical(8, 8, ScheduleKind::ring)).inter_node_lossy_steps, 8);
  EXPECT_EQ(check(hierarchical(1, 8)).inter_node_lossy_steps, 0);
}

TEST(MakeSchedule, MakesEveryKind) {
  EXPECT_EQ(make_schedule(ScheduleKind::tree, 6).kind, ScheduleKind::tree);
  Schedule s = make_schedule(ScheduleKind::hierarchical, 12, {.nodes = 0, .per_node = 4});
  EXPECT_EQ(s.nodes, 3);
  EXPECT_EQ(s.per_node, 4);
  EXPECT_EQ(make_schedule(ScheduleKind::hierarchical, 12, {.nodes = 2}).per_node, 6);
  expect_proven(make_schedule(ScheduleKind::hierarchical, 2 * 100, {.nodes = 100}), "100 nodes");
}

TEST(MakeSchedule, RejectsInvalidSchedules) {
  auto error = [](ScheduleKind kind, int world, Topology topology) {
    return expect_error<BadInput>([&] { make_schedule(kind, world, topology); }, {});
  };
  using K = ScheduleKind;
  EXPECT_EQ(error(K::hierarchical, 6, {}),
            "schedule=hierarchical needs the number of ranks per node; set it or use schedule=ring");
  EXPECT_EQ(error(K::hierarchical, 6, {.nodes = 0, .per_node = 4}),
            "schedule=hierarchical: 6 ranks are not equal nodes of 4 ranks; use nodes of equal size or "
            "schedule=ring");
  EXPECT_EQ(
      error(K::hierarchical, 7, {.nodes = 2, .per_node = 4}),
      "schedule=hierarchical: 7 ranks are not 2 nodes of 4 ranks; use nodes of equal size or schedule=ring");
  expect_has(error(K::hierarchical, 100, {.nodes = 1}), {"use schedule=ring"});
  expect_has(error(K::two_shot, 66, {}), {"use schedule=ring"});
  expect_has(error(K::ring, 0, {}), {"at least 1 rank"});
  EXPECT_THROW(hierarchical(2, 2, ScheduleKind::tree), BadInput);
  EXPECT_THROW(pipelined(ring(2), 0), BadInput);
}

}  // namespace
}  // namespace gradwire::testing
