#include "collectives/schedule/schedule.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "collectives/schedule/checker.h"
#include "kernels/wire/formats.h"
#include "runtime/util/error.h"
#include "tests/collectives/schedule_interpreter.h"
#include "tests/collectives/schedule_mutator.h"
#include "tests/support/expect.h"

namespace gradwire {
namespace {

#ifdef GRADWIRE_SANITIZED
constexpr int kMaxRanks = 24, kMutations = 600;  // ten times slower, on one thread
#else
constexpr int kMaxRanks = 64, kMutations = 4000;
#endif

void expect_proven(const Schedule& s, const std::string& what) {
  CheckReport report = check(s);
  EXPECT_TRUE(report.ok) << what << ":\n" << report.to_string();
  EXPECT_TRUE(report.correct) << what;
}

TEST(Schedule, RingTreeAndTwoShotAreCorrectForEveryWorld) {
  for (int n = 1; n <= kMaxRanks; ++n) {
    for (const Schedule& s : {ring(n), two_shot(n), double_tree(n)}) {
      expect_proven(s, fmt::format("{} of {}", name(s.kind), n));
    }
  }
}

TEST(Schedule, HierarchicalIsCorrectForEveryShape) {
  for (int nodes = 1; nodes <= kMaxRanks; ++nodes) {
    for (int per_node = 1; nodes * per_node <= kMaxRanks; ++per_node) {
      for (ScheduleKind between : {ScheduleKind::two_shot, ScheduleKind::ring}) {
        expect_proven(hierarchical(nodes, per_node, between),
                      fmt::format("{} x {}, {} between nodes", nodes, per_node, name(between)));
      }
    }
  }
}

TEST(Schedule, BothHalvesOfEveryAllreduceAreCorrect) {
  std::vector<Schedule> all;
  for (int n = 1; n <= kMaxRanks; ++n) {
    for (Schedule& s : std::vector<Schedule>{ring(n), two_shot(n), double_tree(n)})
      all.push_back(std::move(s));
    for (int per_node = 1; per_node <= n; ++per_node) {
      if (n % per_node != 0) continue;
      all.push_back(hierarchical(n / per_node, per_node));
      all.push_back(hierarchical(n / per_node, per_node, ScheduleKind::ring));
    }
  }
  for (const Schedule& s : all) {
    const std::string what = fmt::format("{} of {} x {}", name(s.kind), s.nodes, s.per_node);
    const Schedule scatter = reduce_scatter(s), gather = all_gather(s);
    expect_proven(scatter, "reduce-scatter, " + what);
    expect_proven(gather, "all-gather, " + what);
    EXPECT_EQ(scatter.num_rounds() + gather.num_rounds(), s.num_rounds()) << what;
    if (s.world <= 12) {
      EXPECT_EQ(testing::Interpreter(scatter, 3).run(), std::nullopt) << what;
      EXPECT_EQ(testing::Interpreter(gather, 4).run(), std::nullopt) << what;
      expect_proven(pipelined(scatter, 3), "sliced reduce-scatter, " + what);
      expect_proven(pipelined(gather, 3), "sliced all-gather, " + what);
    }
  }
  EXPECT_THROW(reduce_scatter(all_gather(ring(3))), BadInput);
  EXPECT_THROW(all_gather(reduce_scatter(ring(3))), BadInput);
}

// Every world, from the first rank, the last and one in the middle; hierarchical in every shape.
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
        EXPECT_EQ(testing::Interpreter(s, 6).run(), std::nullopt) << what;
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

// Counts the bytes between nodes, of which a direct exchange between all ranks sends too many: 8 times as
// many with 8 ranks per node.
TEST(Schedule, HierarchicalHalvesSendNoMoreBetweenNodesThanARing) {
  for (int nodes : {2, 3, 8}) {
    for (int per_node : {2, 4, 8}) {
      const int world = nodes * per_node;
      // Returns the bytes that leave a node, in buffers. A ring's neighbours are in another node only at a
      // node's ends.
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
    const std::vector<ChunkRange> ranges = chunk_ranges(s, 1107, shards);
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
  // In a two-shot, a rank sends every other rank's shard to that rank, or its own shard to all.
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
  for (int n : {1, 2, 3, 4, 5, 8, 13, 16}) {
    for (int slices : {1, 2, 3, 8}) {
      for (const Schedule& s : {ring(n), two_shot(n), double_tree(n), hierarchical(n, 3)}) {
        Schedule sliced = pipelined(s, slices);
        expect_proven(sliced, fmt::format("{} of {} in {}", name(s.kind), n, slices));
        EXPECT_EQ(sliced.num_rounds(),
                  slices == 1 || s.num_rounds() == 0 ? s.num_rounds() : 2 * (s.num_rounds() - 1) + slices);
        EXPECT_EQ(testing::Interpreter(sliced, 1).run(), std::nullopt);
      }
    }
  }
}

TEST(Schedule, ExecutionGivesTheSum) {
  for (int n = 1; n <= 20; ++n) {
    for (const Schedule& s : {ring(n), two_shot(n), double_tree(n), hierarchical(n, 2), hierarchical(2, n),
                              hierarchical(n, 3, ScheduleKind::ring)}) {
      EXPECT_EQ(testing::Interpreter(s, 5).run(), std::nullopt) << name(s.kind) << " of " << n;
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
    EXPECT_EQ(report.sent_inter_node[r], 2 * 3);      // 2 * 3/4 of an eighth of the buffer
    EXPECT_EQ(report.sent_intra_node[r], 2 * 7 * 4);  // 2 * 7/8 of the buffer
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

// --- what the checker must catch ---

using Rule = CheckReport::Rule;

// Returns the first step of a kind in a round.
Step& first(Schedule& s, int rank, int round, Step::Kind kind) {
  auto& steps = s.rounds[rank][round];
  return *std::find_if(steps.begin(), steps.end(), [&](const Step& step) { return step.kind == kind; });
}

void expect_violation(const Schedule& s, Rule rule, const std::string& text) {
  CheckReport report = check(s);
  EXPECT_FALSE(report.ok);
  EXPECT_EQ(report.correct, rule == Rule::rounding || rule == Rule::cost);
  for (const auto& v : report.violations) {
    if (v.rule == rule && v.text.find(text) != std::string::npos) return;
  }
  ADD_FAILURE() << "no violation of '" << name(rule) << "' with '" << text << "' in:\n" << report.to_string();
}

TEST(Checker, NamesEachViolation) {
  Schedule s = ring(4);
  s.rounds[2][1] = {first(s, 2, 1, Step::Kind::recv_reduce)};
  expect_violation(
      s, Rule::match,
      "round 2: rank 2 sends chunk 3 to rank 3, but there it matches round 1: rank 3 adds chunk 0");

  s = two_shot(3);
  std::erase(s.rounds[2][0], Step{Step::Kind::send, 1, 1});
  std::erase(s.rounds[2][1], Step{Step::Kind::send, 1, 2});
  expect_violation(s, Rule::progress, "round 0: rank 1 adds chunk 1 from rank 2, which never sends it");

  s = ring(4);
  first(s, 2, 1, Step::Kind::send).chunk = 2;
  expect_violation(
      s, Rule::match,
      "round 1: rank 2 sends chunk 2 to rank 3, but there it matches round 1: rank 3 adds chunk 0");

  s = ring(4);
  first(s, 1, 0, Step::Kind::send).peer = 9;
  expect_violation(s, Rule::form, "round 0: rank 1 sends chunk 0 to rank 9, which does not exist");

  s = ring(4);
  first(s, 1, 0, Step::Kind::send).peer = 1;
  expect_violation(s, Rule::form, "itself");

  s = ring(4);
  s.rounds[3].pop_back();
  expect_violation(s, Rule::form, "rank 3 has 5 rounds, rank 0 has 6");

  s = ring(4);
  first(s, 1, 1, Step::Kind::recv_reduce).kind = Step::Kind::recv_copy;
  expect_violation(s, Rule::result, "contributions of rank");

  // Both ends agree on one more contribution, after rank 1 has sent its sum.
  s = ring(4);
  s.rounds[0][1].push_back({Step::Kind::send, 1, 0});
  s.rounds[1][1].push_back({Step::Kind::recv_reduce, 0, 0});
  expect_violation(s, Rule::result,
                   "round 1: rank 1 adds chunk 0 from rank 0, but it has already sent its partial sum");

  s = hierarchical(2, 2);
  for (auto& rounds : s.rounds)
    for (auto& round : rounds)
      for (auto& step : round) step.intra_node = false;
  expect_violation(s, Rule::form, "over a link between nodes, but that is the same node");
}

TEST(Checker, DetectsDifferentRoundsAtTheTwoEnds) {
  // Every rank would get the sum, but the two ends of one transfer are in different rounds.
  Schedule s = ring(3);
  for (auto& rounds : s.rounds) rounds.insert(rounds.begin() + 2, Round{});
  s.rounds[0][2] = {first(s, 0, 1, Step::Kind::send)};
  s.rounds[0][1] = {first(s, 0, 1, Step::Kind::recv_reduce)};
  expect_violation(s, Rule::match,
                   "round 2: rank 0 sends chunk 1 to rank 1, but there it matches round 1: rank 1 adds");
}

TEST(Checker, DetectsWastedBytesAndFalseClaims) {
  Schedule s = two_shot(4);
  s.rounds[0].push_back({{Step::Kind::send, 1, 0}});
  s.rounds[1].push_back({{Step::Kind::recv_copy, 0, 0}});
  s.rounds[2].push_back({});
  s.rounds[3].push_back({});
  expect_violation(s, Rule::cost, "rank 0 sends between nodes 7/4 of the buffer, the optimum is 6/4");

  s = ring(4);
  s.lossy_steps = 2;
  expect_violation(s, Rule::rounding, "declares 2 lossy steps with the wire on every link, takes 4");

  // Too many messages at once for the kernel that adds them.
  EXPECT_TRUE(check(two_shot(kMaxInputs + 1)).ok);
  expect_violation(two_shot(kMaxInputs + 2), Rule::rounding, "a hop adds 65 messages at once");
}

TEST(Checker, DetectsABroadcastThatEntersANodeTwice) {
  // Rank 2 gets the buffer from rank 0 instead of from its neighbour in the node.
  Schedule s = broadcast(ScheduleKind::hierarchical, 4, 0, {.nodes = 2});
  EXPECT_TRUE(check(s).ok);
  for (int c = 0; c < s.chunks; ++c) {
    for (int r : {2, 3}) {
      for (Round& round : s.rounds[r]) {
        std::erase_if(round, [&](const Step& step) { return step.chunk == c && step.intra_node; });
      }
      if (std::any_of(s.rounds[r][0].begin(), s.rounds[r][0].end(),
                      [&](const Step& step) { return step.chunk == c; })) {
        continue;
      }
      s.rounds[0][0].push_back({Step::Kind::send, r, c});
      s.rounds[r][0].push_back({Step::Kind::recv_copy, 0, c});
    }
  }
  expect_violation(s, Rule::cost, "node 1 is entered by 4/2 of the buffer");
  expect_violation(s, Rule::cost, "rank 0 sends between nodes 4/2 of the buffer, the optimum is 2/2");
}

TEST(Checker, DetectsAValueThatOnlySomeRanksWouldRound) {
  // Two nodes of two. Rank 0 owns the only chunk and sends the result inside its node before the result
  // crosses to the other.
  Schedule s;
  s.kind = ScheduleKind::hierarchical;
  s.world = 4;
  s.nodes = s.per_node = 2;
  s.chunks = 1;
  s.owner = {0};
  s.lossy_steps = 2;
  auto send = [](int peer, bool fast) { return Step{Step::Kind::send, peer, 0, fast}; };
  auto add = [](int peer, bool fast) { return Step{Step::Kind::recv_reduce, peer, 0, fast}; };
  auto get = [](int peer, bool fast) { return Step{Step::Kind::recv_copy, peer, 0, fast}; };
  s.rounds = {
      {{add(1, true), add(2, false), add(3, false)}, {send(1, true)}, {send(2, false), send(3, false)}},
      {{send(0, true)}, {get(0, true)}, {}},
      {{send(0, false)}, {}, {get(0, false)}},
      {{send(0, false)}, {}, {get(0, false)}}};
  expect_violation(s, Rule::rounding,
                   "round 2: rank 0 sends chunk 0 to rank 2 to another node, after it was sent unrounded");
}

// --- mutations: the checker must reject exactly the schedules that fail in execution ---

TEST(Checker, AgreesWithExecutionOnThousandsOfMutations) {
  std::mt19937_64 random(20240607);
  std::map<std::string, int> harmful, harmless;
  for (int i = 0; i < kMutations; ++i) {
    Schedule s = testing::random_schedule(random, random() % 4 == 0 ? kMaxRanks : 10, true);
    std::string what = fmt::format("{} {} of {}", name(s.collective), name(s.kind), s.world);
    std::string change = testing::Mutator(s, random).mutate();
    int changes = 1;
    // Sometimes makes a second change, which may hide the first.
    if (random() % 4 == 0 && check(s).correct) testing::Mutator(s, random).mutate(), ++changes;
    CheckReport report = check(s);
    auto wrong = testing::Interpreter(s, i).run();
    EXPECT_EQ(report.correct, !wrong.has_value())
        << what << ", mutation " << i << ", " << change << " and " << changes - 1 << " more: execution says "
        << wrong.value_or("right") << ", the checker\n"
        << report.to_string();
    ++(wrong ? harmful : harmless)[change];
  }
  int caught = 0;
  for (const auto& [change, times] : harmful) caught += times;
  EXPECT_GE(caught, kMutations / 2);
  for (const char* change :
       {"dropped", "doubled", "swapped on a rank", "misdirected", "chunk changed", "kind changed",
        "chunk changed on both sides", "dropped on both sides", "add and copy exchanged"}) {
    EXPECT_GE(harmful[change], kMutations / 80) << change;
  }
  // Order inside a round is irrelevant, and sending a result twice only wastes bytes: these must not be
  // rejected.
  EXPECT_GE(harmless["swapped in a round"], kMutations / 80);
  for (const auto& [change, times] : harmful) RecordProperty(change + ", harmful", times);
  for (const auto& [change, times] : harmless) RecordProperty(change + ", harmless", times);
}

// --- choosing ---

TEST(MakeSchedule, MakesEveryKind) {
  EXPECT_EQ(make_schedule(ScheduleKind::tree, 6).kind, ScheduleKind::tree);
  Schedule s = make_schedule(ScheduleKind::hierarchical, 12, {.nodes = 0, .per_node = 4});
  EXPECT_EQ(s.nodes, 3);
  EXPECT_EQ(s.per_node, 4);
  EXPECT_EQ(make_schedule(ScheduleKind::hierarchical, 12, {.nodes = 2}).per_node, 6);
  expect_proven(make_schedule(ScheduleKind::hierarchical, 2 * 100, {.nodes = 100}), "100 nodes");
}

TEST(MakeSchedule, RejectsInvalidSchedules) {
  auto error = [](ScheduleKind kind, int world, Topology topology) -> std::string {
    try {
      make_schedule(kind, world, topology);
    } catch (const BadInput& e) {
      return e.what();
    }
    return "accepted";
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
  testing::expect_has(error(K::hierarchical, 100, {.nodes = 1}), {"use schedule=ring"});
  testing::expect_has(error(K::two_shot, 66, {}), {"use schedule=ring"});
  testing::expect_has(error(K::ring, 0, {}), {"at least 1 rank"});
  EXPECT_THROW(hierarchical(2, 2, ScheduleKind::tree), BadInput);
  EXPECT_THROW(pipelined(ring(2), 0), BadInput);
}

}  // namespace
}  // namespace gradwire
