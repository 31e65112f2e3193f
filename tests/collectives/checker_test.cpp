// Tests of the schedule checker: the checker names each violation and agrees with execution.
#include "collectives/schedule/checker.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "kernels/wire/format.h"
#include "tests/collectives/schedule_interpreter.h"
#include "tests/collectives/schedule_mutator.h"

namespace gradwire {
namespace {

#ifdef GRADWIRE_SANITIZED
constexpr int kMutatedRanks = 24, kMutations = 600;  // fewer, because sanitizer builds are ten times slower
#else
constexpr int kMutatedRanks = 64, kMutations = 4000;
#endif

using Rule = CheckReport::Rule;

// Returns the rank's first step of this kind in this round.
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

  // Both ends agree on an additional contribution that arrives after rank 1 has sent its sum.
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

  // This world sends more messages at once than the adding kernel accepts.
  EXPECT_TRUE(check(two_shot(kMaxInputs + 1)).ok);
  expect_violation(two_shot(kMaxInputs + 2), Rule::rounding, "a hop adds 65 messages at once");
}

TEST(Checker, DetectsABroadcastThatEntersANodeTwice) {
  // Rank 2 gets the buffer from rank 0 instead of from its neighbour in the same node.
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
  // The schedule has two nodes of two ranks. Rank 0 owns the only chunk and sends the result inside its node
  // before sending it to the other node.
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

// Expects the checker to reject exactly the schedules that fail in execution.
TEST(Checker, AgreesWithExecutionOnThousandsOfMutations) {
  std::mt19937_64 random(20240607);
  std::map<std::string, int> harmful, harmless;
  for (int i = 0; i < kMutations; ++i) {
    Schedule s = testing::random_schedule(random, random() % 4 == 0 ? kMutatedRanks : 10, true);
    std::string what = fmt::format("{} {} of {}", name(s.collective), name(s.kind), s.world);
    std::string change = testing::Mutator(s, random).mutate();
    int changes = 1;
    // Sometimes makes a second change, which may cancel the first change.
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
  // The order inside a round is irrelevant, and sending a result twice only wastes bytes. The checker must
  // accept such changes.
  EXPECT_GE(harmless["swapped in a round"], kMutations / 80);
  for (const auto& [change, times] : harmful) RecordProperty(change + ", harmful", times);
  for (const auto& [change, times] : harmless) RecordProperty(change + ", harmless", times);
}

}  // namespace
}  // namespace gradwire
