// `gradwire plan`: cluster files, the simulation of schedules, NCCL's estimate, and predicted steps.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "collectives/schedule/checker.h"
#include "runtime/util/error.h"
#include "trainer/plan/nccl_model.h"
#include "trainer/plan/plan.h"
#include "trainer/plan/simulator.h"

namespace gradwire {
namespace {

// Nodes of 4 GPUs: NVLink 100 GB/s and 2 us, two network cards of 10 GB/s and 5 us.
Cluster small_cluster(const std::string& switches = "[]") {
  return parse_cluster(fmt::format(R"({{"name": "small", "gpus_per_node": 4,
    "gpu": {{"generation": "hopper", "tflops": 50, "memory_gb_per_s": 2000}},
    "nvlink": {{"gb_per_s": 100, "latency_us": 2}},
    "nic": {{"per_node": 2, "gb_per_s": 10, "latency_us": 5}}, "switches": {}}})",
                                   switches),
                       "small.json");
}

constexpr double kMegabyte = 1e6;
double time_us(ScheduleKind kind, const Cluster& cluster, int ranks, bool symmetric, double bytes = kMegabyte,
               int slices = 1) {
  const Fabric fabric(cluster, ranks, symmetric);
  return simulate_us(flow_rounds(kind, fabric, slices), fabric, bytes, bytes, true);
}

std::string error_of(const std::string& text) {
  try {
    parse_cluster(text, "cluster.json");
  } catch (const BadInput& error) {
    return error.what();
  }
  return "";
}

TEST(ClusterFile, RejectsInvalidValuesByName) {
  const std::string gpu = R"("gpu": {"generation": "hopper", "tflops": 50, "memory_gb_per_s": 2000})";
  const auto file = [&](const std::string& rest) {
    return fmt::format(R"({{"name": "x", "gpus_per_node": 4, {}, {}}})", gpu, rest);
  };
  EXPECT_NE(error_of("{").find("cluster.json: not a JSON file"), std::string::npos);
  EXPECT_NE(error_of("[]").find("must be an object"), std::string::npos);
  EXPECT_NE(error_of(file(R"("nvlink": {"gb_per_s": 0, "latency_us": 1})")).find("nvlink.gb_per_s"),
            std::string::npos);
  EXPECT_NE(error_of(file(R"("nvlink": {"gb_per_s": 9, "latency_us": 1, "lanes": 2})"))
                .find("unknown key nvlink.lanes; use gb_per_s, latency_us"),
            std::string::npos);
  EXPECT_NE(error_of(file(R"("nic": {"per_node": 1, "gb_per_s": 1, "latency_us": 1})"))
                .find("one of nvlink and pcie"),
            std::string::npos);
  EXPECT_NE(error_of(file(R"("nvlink": {"gb_per_s": 9})")).find("nvlink.latency_us is missing"),
            std::string::npos);
  EXPECT_NE(
      error_of(file(R"("nvlink": {"gb_per_s": 9, "latency_us": 1}, "nccl": {"network_protocols": ["l"]})"))
          .find("nccl.network_protocols must be a list of some of ll, ll128, simple"),
      std::string::npos);
  EXPECT_EQ(error_of(file(R"("nvlink": {"gb_per_s": 9, "latency_us": 1})")), "");
}

TEST(ClusterFile, RejectsRanksThatDoNotFillNodesOrSwitches) {
  const Cluster cluster = small_cluster(R"([{"nodes": 2, "oversubscription": 1}])");
  EXPECT_NO_THROW(check_ranks(cluster, 3));
  EXPECT_NO_THROW(check_ranks(cluster, 16));
  EXPECT_THROW(check_ranks(cluster, 10), BadInput);
  EXPECT_THROW(check_ranks(cluster, 12), BadInput);
}

TEST(Simulator, FlowsOfTheBuildersAreThoseOfTheSchedules) {
  const Cluster cluster = small_cluster();
  for (ScheduleKind kind : all_schedules()) {
    for (int ranks : {2, 4, 8, 12, 32}) {
      if (kind == ScheduleKind::hierarchical && ranks < 8) continue;
      const Fabric fabric(cluster, ranks, false);
      const Schedule schedule = make_schedule(kind, ranks, {.nodes = 0, .per_node = fabric.per_node()});
      for (int slices : {1, 3}) {
        const FlowRounds built = flow_rounds(kind, fabric, slices);
        const FlowRounds listed = flow_rounds(pipelined(schedule, slices));
        EXPECT_EQ(built.chunks, listed.chunks);
        ASSERT_EQ(built.runs.size(), listed.runs.size()) << name(kind) << ", " << ranks << " ranks";
        for (size_t i = 0; i < built.runs.size(); ++i) {
          EXPECT_EQ(built.runs[i].flows, listed.runs[i].flows);
          EXPECT_EQ(built.runs[i].rounds, listed.runs[i].rounds);
        }
      }
    }
  }
}

TEST(Simulator, BytesOfEachRankAreThoseOfTheChecker) {
  const Cluster cluster = small_cluster(R"([{"nodes": 2, "oversubscription": 2}])");
  for (ScheduleKind kind : all_schedules()) {
    for (int ranks : {4, 8, 16, 32}) {
      if (!SimulatedSchedule::supports(kind, cluster, ranks)) continue;
      const Fabric fabric(cluster, ranks, is_symmetric(kind));
      const auto sent = sent_by_level(flow_rounds(kind, fabric), fabric);
      const Schedule schedule = make_schedule(kind, ranks, {.nodes = 0, .per_node = fabric.per_node()});
      const CheckReport report = check(schedule);
      ASSERT_TRUE(report.ok) << report.to_string();
      for (int r = 0; r < ranks; ++r) {
        const int like = r % fabric.period();
        const double all = sent[0][like] + (sent.size() > 1 ? sent[1][like] : 0);
        const auto counted =
            static_cast<double>(report.sent_inter_node[r] + report.sent_intra_node[r]) / schedule.chunks;
        EXPECT_NEAR(all, counted, 1e-12) << name(kind) << ", rank " << r << " of " << ranks;
      }
    }
  }
}

TEST(Simulator, RingTakesLatencyAndBytesInEachRound) {
  const Cluster cluster = small_cluster();
  EXPECT_NEAR(time_us(ScheduleKind::ring, cluster, 4, true), 6 * (2 + 0.25e6 / 100e3), 1e-6);
  // Between nodes, a ring uses one of the two cards, so every round waits for that card.
  EXPECT_NEAR(time_us(ScheduleKind::ring, cluster, 8, true), 14 * (5 + 0.125e6 / 10e3), 1e-6);
}

TEST(Simulator, MessagesShareTheLinksOnTheirPath) {
  const Cluster cluster = small_cluster();
  // Each of the 4 GPUs sends 4 messages between nodes in a round, and two GPUs share a card.
  const double between = 8 * 0.125e6 / 10e3;
  EXPECT_NEAR(time_us(ScheduleKind::two_shot, cluster, 8, true), 2 * (5 + between), 1e-6);
  // Switches of one node pass half of what the cards send.
  const Cluster narrow = small_cluster(R"([{"nodes": 1, "oversubscription": 2}])");
  EXPECT_NEAR(time_us(ScheduleKind::two_shot, narrow, 8, true), 2 * (5 + 2 * between), 1e-6);
}

TEST(Simulator, RepresentativeRanksTakeTheTimeOfAllRanks) {
  const Cluster cluster =
      small_cluster(R"([{"nodes": 2, "oversubscription": 3}, {"nodes": 4, "oversubscription": 5}])");
  for (ScheduleKind kind : {ScheduleKind::ring, ScheduleKind::two_shot, ScheduleKind::hierarchical}) {
    for (int ranks : {16, 32, 48}) {
      for (int slices : {1, 4}) {
        const double all = time_us(kind, cluster, ranks, false, 50 * kMegabyte, slices);
        EXPECT_NEAR(time_us(kind, cluster, ranks, true, 50 * kMegabyte, slices), all, 1e-6 * all)
            << name(kind) << ", " << ranks << " ranks, " << slices << " slices";
      }
    }
  }
}

TEST(Simulator, ExtrapolatesEqualRounds) {
  const Cluster cluster = small_cluster(R"([{"nodes": 4, "oversubscription": 4}])");
  for (ScheduleKind kind : {ScheduleKind::ring, ScheduleKind::hierarchical}) {
    const Fabric fabric(cluster, 512, true);
    const FlowRounds rounds = flow_rounds(kind, fabric);
    for (double bytes : {1e5, 1e8}) {
      const double all = simulate_us(rounds, fabric, bytes, bytes, true);
      EXPECT_NEAR(simulate_us(rounds, fabric, bytes, bytes), all, 1e-3 * all) << name(kind);
    }
  }
}

TEST(Simulator, InterpolatesBetweenPowersOfTwo) {
  const Cluster cluster = small_cluster();
  for (ScheduleKind kind : all_schedules()) {
    SimulatedSchedule schedule(kind, cluster, 16);
    const double low = schedule.cost(1 << 20, kFp32, false).us,
                 high = schedule.cost(1 << 21, kFp32, false).us;
    EXPECT_NEAR(schedule.cost(3 << 19, kFp32, false).us, (low + high) / 2, 1e-9 * high) << name(kind);
    EXPECT_LT(low, high);
  }
}

// Eight H200 behind NVSwitches, with the two numbers that docs/plan.md fits.
Cluster h200() {
  return parse_cluster(R"({"name": "8x H200", "gpus_per_node": 8,
    "gpu": {"generation": "hopper", "tflops": 300, "memory_gb_per_s": 4000},
    "nvlink": {"gb_per_s": 365, "latency_us": 3.4},
    "nccl": {"launch_us": 22, "nvls_gb_per_s": 482}})",
                       "h200.json");
}

TEST(NcclModel, ChoosesLlRingsForSmallAndNvlsForLargeMessages) {
  const NcclEstimate small = nccl_allreduce_estimate(h200(), 8, 256 << 10);
  EXPECT_EQ(small.algorithm + " " + small.protocol, "ring ll");
  const NcclEstimate large = nccl_allreduce_estimate(h200(), 8, 256 << 20);
  EXPECT_EQ(large.algorithm + " " + large.protocol, "nvls simple");
  Cluster without = h200();
  without.nccl.nvls_gb_per_s = 0;
  EXPECT_EQ(nccl_allreduce_estimate(without, 8, 256 << 20).algorithm, "ring");
  without.nccl.algorithms = {"nvls"};
  EXPECT_THROW(nccl_allreduce_estimate(without, 8, 256 << 20), BadInput);
}

TEST(NcclModel, RingMovesTheBusBandwidthOfItsSlowestLink) {
  const double bytes = 1e10;
  const NcclEstimate inside = nccl_allreduce_estimate(h200(), 8, bytes);
  EXPECT_NEAR(2 * 7.0 / 8 * bytes / inside.us / 1e3, 482, 5);
  const NcclEstimate between = nccl_allreduce_estimate(small_cluster(), 32, bytes);
  EXPECT_NEAR(2 * 31.0 / 32 * bytes / between.us / 1e3, 20, 0.2);
}

const PlanRow& row_of(const Plan& plan, const std::string& spec, const std::string& schedule) {
  for (const PlanRow& row : plan.rows) {
    if (row.best.spec == spec && row.best.schedule == schedule) return row;
  }
  throw Error("no row " + spec + " " + schedule);
}

TEST(Plan, CompressionGainsNothingOnNvlinkAndMuchBetweenNodes) {
  PlanRequest request{.cluster = h200(),
                      .ranks = 8,
                      .model = named_model("vit_b_32"),
                      .batch_size = 32,
                      .specs = {},
                      .bucket_mb = {}};
  const Plan fast = make_plan(request);
  EXPECT_EQ(fast.rows[0].best.schedule, "nccl");
  for (const PlanRow& row : fast.rows) EXPECT_LT(fast.rows[0].best.step_ms, 1.1 * row.best.step_ms);
  request.cluster = small_cluster();
  request.cluster.nic.gb_per_s = 0.1;
  request.ranks = 32;
  const Plan slow = make_plan(request);
  EXPECT_LT(2 * row_of(slow, "powersgd:rank=4", "ring").best.step_ms, slow.rows[0].best.step_ms);
  EXPECT_LT(row_of(slow, "bf16", "hierarchical").best.step_ms, slow.rows[0].best.step_ms);
  // A hierarchical schedule sends a quarter of the bytes between nodes.
  const std::vector<double>& ring = row_of(slow, "bf16", "ring").level_bytes;
  const std::vector<double>& layered = row_of(slow, "bf16", "hierarchical").level_bytes;
  EXPECT_LT(layered[1], 0.3 * ring[1]);
}

TEST(Plan, BytesAreThoseThatARankSendsOfEachSpec) {
  const Cluster cluster = small_cluster();
  SimulatedSchedule ring(ScheduleKind::ring, cluster, 8);
  EXPECT_NEAR(ring.cost(1000, kFp32, false).sent_bytes, 2 * 7.0 / 8 * 4000, 1e-6) << "on all levels together";
  const Plan plan = make_plan(
      {.cluster = cluster,
       .ranks = 8,
       .model = named_model("vit_tiny"),
       .batch_size = 1,
       .specs = {"fp32:schedule=ring", "randk:ratio=0.1,schedule=ring", "dion:rank=4,schedule=ring"},
       .bucket_mb = {25}});
  const auto share = [&](size_t row) {
    return plan.rows[row].best.sent_bytes / plan.rows[1].best.sent_bytes;
  };
  EXPECT_NEAR(share(2), 0.1, 1e-3);
  EXPECT_LT(share(3), 0.3);
}

TEST(Plan, ErrorGrowsWithRanksInRingsOnly) {
  PlanRequest request{.cluster = small_cluster(),
                      .ranks = 8,
                      .model = named_model("vit_tiny"),
                      .batch_size = 1,
                      .specs = {"bf16", "fp32"},
                      .bucket_mb = {25}};
  const Plan few = make_plan(request);
  request.ranks = 64;
  const Plan many = make_plan(request);
  EXPECT_GT(row_of(many, "bf16", "ring").error, 2 * row_of(few, "bf16", "ring").error);
  EXPECT_EQ(row_of(many, "bf16", "two_shot").error, row_of(few, "bf16", "two_shot").error);
  EXPECT_EQ(row_of(many, "fp32", "ring").error, 0);
}

TEST(Plan, UsesMeasuredKernelTimes) {
  PlanRequest request{.cluster = small_cluster(),
                      .ranks = 8,
                      .model = named_model("vit_tiny"),
                      .batch_size = 1,
                      .specs = {"bf16:schedule=ring"},
                      .bucket_mb = {25}};
  request.cluster.kernels_ns_per_element["bf16:schedule=ring"] = 3;
  const Plan plan = make_plan(request);
  ASSERT_EQ(plan.rows.size(), 2u);
  EXPECT_NEAR(plan.rows[1].best.codec_ms, 3e-6 * static_cast<double>(plan.parameters), 1e-9);
}

}  // namespace
}  // namespace gradwire
