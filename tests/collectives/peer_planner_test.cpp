// transport=peer: parsing of the option, and when the planner chooses peer memory.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "collectives/codec/codec.h"
#include "collectives/plan/planner.h"
#include "collectives/spec/spec.h"
#include "runtime/util/error.h"
#include "tests/support/expect.h"

namespace gradwire::testing {
namespace {

TEST(TransportLsa, IsAnOptionOfASpec) {
  EXPECT_EQ(CompressionSpec::parse("bf16:transport=peer").peer_access, PeerAccessMode::on);
  EXPECT_EQ(CompressionSpec::parse("bf16:transport=messages").peer_access, PeerAccessMode::off);
  EXPECT_EQ(CompressionSpec::parse("bf16:transport=auto").peer_access, PeerAccessMode::automatic);
  EXPECT_EQ(CompressionSpec::parse("bf16:transport=auto").to_string(), "bf16:transport=auto");
  EXPECT_EQ(CompressionSpec::parse("powersgd:rank=2,transport=peer").to_string(),
            "powersgd:rank=2,transport=peer");
  EXPECT_EQ(CompressionSpec::parse("bf16:transport=messages").to_string(), "bf16");
  EXPECT_EQ(CompressionSpec::parse("bf16:schedule=hierarchical,transport=peer,intra_node=fp32").peer_access,
            PeerAccessMode::on);
  for (const char* schedule : {"ring", "tree", "nccl"}) {
    for (const char* transport : {"peer", "auto"}) {
      EXPECT_THROW(CompressionSpec::parse(fmt::format("bf16:transport={},schedule={}", transport, schedule)),
                   BadInput);
    }
  }
}

SchedulePlanner::Choice choose_peer(int world, int64_t count, Wire wire, const std::string& obstacle = "") {
  ScheduleRequest request = schedule_request(CompressionSpec::parse("bf16:transport=peer"));
  request.peer_access_obstacle = obstacle;
  LinkCosts costs;
  costs.peer_memory = {.latency_us = 4, .bytes_per_us = 300e3};
  return SchedulePlanner(request, world, 0, costs, kSliceBytes).choose(count, wire);
}

TEST(TransportLsa, ReducesSmallBuffersInOneShotAndLargeOnesInTwo) {
  for (Wire wire : {kFp32, kBf16}) {
    EXPECT_EQ(choose_peer(8, 1000, wire).schedule.execution, Execution::one_shot_kernel);
    EXPECT_EQ(choose_peer(8, 10'000'000, wire).schedule.execution, Execution::two_shot_kernel);
  }
  EXPECT_LT(choose_peer(8, 1000, kBf16).predicted_us, choose_peer(8, 10'000'000, kBf16).predicted_us);
  EXPECT_EQ(choose_peer(8, 1000, kBf16).schedule.rounds, two_shot(8).rounds);
}

// Expects peer memory inside nodes and messages between nodes. Rounds inside nodes cost as much as peer
// memory.
TEST(TransportLsa, HierarchicalSchedulesReadMemoryInsideNodes) {
  LinkCosts costs;
  costs.measured = true;
  costs.intra_node = {30, 5000};
  costs.inter_node = {50, 1000};
  costs.peer_memory = {4, 300e3};
  const auto plan = [&](const std::string& spec, const std::string& obstacle, int per_node) {
    ScheduleRequest request = schedule_request(CompressionSpec::parse(spec));
    request.peer_access_obstacle = obstacle;
    return SchedulePlanner(request, 8, per_node, costs, 0).choose(1'000'000, kFp32);
  };
  const auto messages = plan("fp32:schedule=hierarchical", "", 4);
  const auto memory = plan("fp32:schedule=hierarchical,transport=peer", "", 4);
  EXPECT_EQ(memory.schedule.execution, Execution::node_peer_access);
  EXPECT_EQ(memory.schedule.rounds, messages.schedule.rounds);
  expect_has(memory.reason, {"requested, 2 nodes of 4, with peer access inside nodes"});
  // The messages take two rounds of 3/4 of 4 MB inside nodes.
  EXPECT_NEAR(messages.predicted_us - memory.predicted_us, 2 * (30 - 4) + 6e6 / 5000 - 6e6 / 300e3, 1);
  const auto without = plan("fp32:schedule=hierarchical,transport=peer", "no NVLink", 4);
  EXPECT_EQ(without.schedule.execution, Execution::messages);
  expect_has(without.reason, {"no peer access inside nodes: no NVLink"});
  EXPECT_EQ(plan("fp32:schedule=hierarchical,transport=peer", "", 1).schedule.execution, Execution::messages);
}

// Expects messages where the kernel is slow. Between GPUs, a kernel of few thread blocks encodes more slowly
// than the kernels of messages, which use the whole GPU. Such a kernel also has few bytes of a small wire in
// flight.
TEST(TransportLsa, AutoChoosesMessagesWhenTheKernelIsSlowerThanTheLinks) {
  LinkCosts costs;
  costs.measured = true;
  costs.neighbour = costs.all_pairs = costs.intra_node = costs.inter_node = {30, 200e3};
  costs.peer_memory = {4, 340e3};
  const auto execution = [&](const char* format, int64_t count, double read_us) {
    costs.peer_read_us = read_us;
    const Wire wire = wire_format(format);
    return SchedulePlanner(schedule_request(CompressionSpec::parse(
                               fmt::format("{}:transport=auto,schedule=two_shot", format))),
                           8, 0, costs, 0)
        .choose(count, wire)
        .schedule.execution;
  };
  for (const char* format : {"fp32", "bf16", "fp8", "int8", "int4", "sign"}) {
    EXPECT_NE(execution(format, 10'000, 1), Execution::messages) << format;
  }
  for (const char* format : {"fp32", "bf16"})
    EXPECT_EQ(execution(format, 25'000'000, 1), Execution::two_shot_kernel) << format;
  for (const char* format : {"int8", "int4", "sign"})
    EXPECT_EQ(execution(format, 25'000'000, 1), Execution::messages) << format;
  EXPECT_EQ(execution("int8", 25'000'000, 0), Execution::two_shot_kernel) << "between host threads";
  EXPECT_EQ(execution("bf16", 25'000'000, 20), Execution::messages) << "slow reads";
}

// Compares planted costs. Messages are faster than a kernel whose memory has a low bandwidth or a slow
// barrier.
TEST(TransportLsa, AutoComparesMemoryWithMessages) {
  LinkCosts costs;
  costs.measured = true;
  costs.neighbour = costs.all_pairs = costs.intra_node = costs.inter_node = {30, 20e3};
  const auto plan = [&](const std::string& spec, int64_t count, LinkCosts::Pattern memory, int per_node = 0) {
    LinkCosts with = costs;
    with.peer_memory = memory;
    return SchedulePlanner(schedule_request(CompressionSpec::parse(spec)), 8, per_node, with, 0)
        .choose(count, kFp32);
  };
  constexpr int64_t kLittle = 1000, kMuch = 6'000'000;
  const LinkCosts::Pattern fast{4, 300e3}, far{4, 2e3}, late{400, 300e3};
  for (const char* spec : {"fp32:transport=auto", "fp32:schedule=two_shot,transport=auto"}) {
    for (int64_t count : {kLittle, kMuch}) {
      const auto choice = plan(spec, count, fast);
      EXPECT_NE(choice.schedule.execution, Execution::messages);
      expect_has(choice.reason, {"in one kernel", "predicted", "by messages"});
    }
    EXPECT_NE(plan(spec, kLittle, far).schedule.execution, Execution::messages);
    const auto much = plan(spec, kMuch, far);
    EXPECT_EQ(much.schedule.execution, Execution::messages);
    expect_has(much.reason, {"; in one kernel 21 ms"});  // 2 x 7/8 of 24 MB at 2 GB/s
    EXPECT_EQ(plan(spec, kLittle, late).schedule.execution, Execution::messages);
    EXPECT_NE(plan(spec, kMuch, late).schedule.execution, Execution::messages);
  }
  // If the spec requests peer memory, the planner always uses peer memory. The reason states the time that
  // messages would take.
  const auto forced = plan("fp32:transport=peer", kMuch, far);
  EXPECT_EQ(forced.schedule.execution, Execution::two_shot_kernel);
  expect_has(forced.reason,
             {"in two shots; 21 ms predicted", "by messages 2.16 ms"});  // 2 x 30 us, 42 MB at 20 GB/s

  const std::string nodes = "fp32:schedule=hierarchical,transport=auto";
  EXPECT_EQ(plan(nodes, kMuch, fast, 4).schedule.execution, Execution::node_peer_access);
  expect_has(plan(nodes, kMuch, fast, 4).reason,
             {"2 nodes of 4, with peer access inside nodes", "by messages"});
  EXPECT_EQ(plan(nodes, kMuch, far, 4).schedule.execution, Execution::messages);
  expect_has(plan(nodes, kMuch, far, 4).reason, {"with peer access inside nodes"});
  EXPECT_EQ(plan("fp32:transport=auto", kMuch, fast).schedule.rounds, two_shot(8).rounds);
}

TEST(TransportLsa, SendsMessagesAndGivesTheReasonWithoutPeerMemory) {
  const auto choice = choose_peer(8, 1000, kBf16, "GPUs of several machines");
  EXPECT_EQ(choice.schedule.execution, Execution::messages);
  expect_has(choice.reason, {"not in one kernel: GPUs of several machines"});
}

}  // namespace
}  // namespace gradwire::testing
