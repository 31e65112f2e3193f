// Conclusions of `gradwire doctor`: network interfaces, and predictions from given costs.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <limits>

#include "collectives/communicator/communicator.h"
#include "runtime/util/error.h"
#include "tests/trainer/files.h"
#include "trainer/log/summary.h"
#include "trainer/measure/peaks.h"
#include "trainer/measure/ranks.h"
#include "trainer/measure/recommend.h"
#include "trainer/model/parameters.h"

namespace gradwire::testing {
namespace {

namespace fs = std::filesystem;

TEST(Table, AlignsColumns) {
  EXPECT_EQ(table_text({{"a", "bb"}, {"ccc", "d"}}, " "), " a    bb\n ccc   d\n");
}

TEST(Network, ReadsInterfacesFromSysfs) {
  const TemporaryFolder sys;
  auto write = [&](const std::string& file, const std::string& text) {
    const fs::path path = sys.path(file);
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text << "\n";
  };
  write("class/net/lo/operstate", "unknown");
  write("class/net/eth1/operstate", "up");
  write("class/net/eth1/speed", "25000");
  write("class/net/eth0/operstate", "down");
  write("class/net/eth0/speed", "-1");
  write("class/net/bonding_masters", "");  // a file, not an interface
  write("class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE");
  write("class/infiniband/mlx5_0/ports/1/rate", "200 Gb/sec (4X HDR)");
  write("class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand");
  write("class/infiniband/mlx5_1/ports/1/state", "1: DOWN");
  const Network network = find_network(sys.path());
  ASSERT_EQ(network.interfaces.size(), 2u);
  EXPECT_EQ(network.interfaces[0].name, "eth0");
  EXPECT_TRUE(!network.interfaces[0].up && network.interfaces[0].megabits == -1);
  EXPECT_TRUE(network.interfaces[1].up && network.interfaces[1].megabits == 25000);
  ASSERT_EQ(network.ports.size(), 2u);
  EXPECT_EQ(network.ports[0].rate, "200 Gb/sec (4X HDR)");
  EXPECT_TRUE(network.ports[0].active && !network.ports[1].active);
  EXPECT_TRUE(find_network("/nowhere").ports.empty());
}

// Returns the costs of vit_b_32 on a device that takes 100 ms for a batch.
StepCosts costs(double bytes_per_us, double latency_us = 20) {
  StepCosts costs;
  for (const VitParameter& p : vit_parameters(named_model("vit_b_32")))
    costs.tensors.push_back({p.name, p.shape});
  costs.world = 4;
  costs.links.measured = true;
  costs.links.neighbour = costs.links.all_pairs = costs.links.intra_node =
      costs.links.inter_node = {latency_us, bytes_per_us};
  costs.compute_ms = 100;
  costs.optimizer_ms = 2;
  for (const std::string& spec : candidate_specs()) costs.codec_ns[spec] = spec == "fp32" ? 0.004 : 0.01;
  return costs;
}

TEST(Recommend, RecommendsCompressionOnSlowLinksOnly) {
  const Recommendation fast = recommend(costs(200e3, 5));
  EXPECT_FALSE(fast.compress());
  EXPECT_LT(fast.best[0].exposed_ms, 5);
  const Recommendation slow = recommend(costs(125));  // 1 Gb/s
  ASSERT_TRUE(slow.compress());
  const Prediction &plain = slow.best[0], &chosen = slow.best[slow.chosen];
  EXPECT_TRUE(chosen.spec.starts_with("powersgd")) << chosen.spec;
  EXPECT_GT(plain.step_ms, 10 * chosen.step_ms);
  // The rank sends 3/4 of 353 MB twice, at 125 MB/s.
  EXPECT_NEAR(plain.comm_ms, 2 * 0.75 * 4 * 88'224'232 / 125e3, 0.05 * plain.comm_ms);
  EXPECT_NEAR(plain.sent_bytes, 2 * 0.75 * 4 * 88'224'232, 1e4);
  EXPECT_NEAR(plain.step_ms, 102 + plain.exposed_ms, 1e-6);
  EXPECT_GE(slow.one_bucket.step_ms, plain.step_ms);
  // For some link of medium speed, a more accurate spec suffices.
  bool gentle = false;
  for (double rate = 125; rate < 200e3; rate *= 1.5) {
    const Recommendation r = recommend(costs(rate));
    gentle = gentle || r.best[r.chosen].spec == "bf16";
  }
  EXPECT_TRUE(gentle);
}

TEST(Recommend, FasterLinksNeverMakeStepsLonger) {
  for (const std::string& spec : candidate_specs()) {
    for (const char* schedule : {"ring", "two_shot", "tree"}) {
      const std::string text =
          spec + (spec.find(':') == std::string::npos ? ":" : ",") + "schedule=" + schedule;
      for (int64_t mb : {5, 25, 400}) {
        for (bool shared : {false, true}) {
          double before = std::numeric_limits<double>::infinity();
          for (double rate = 50; rate < 1e6; rate *= 3) {
            StepCosts c = costs(rate);
            c.shared_cores = shared;
            c.codec_ns[text] = 0.5;
            const double ms = predict_step(c, text, mb).step_ms;
            EXPECT_LE(ms, before) << text << " " << mb << " MB at " << rate;
            EXPECT_GE(ms, c.compute_ms + c.optimizer_ms) << text;
            before = ms;
          }
        }
      }
    }
  }
}

TEST(Recommend, KernelsOverlapWithBackwardUnlessTheyShareItsCores) {
  StepCosts c = costs(1e9, 0);  // links without cost
  c.codec_ns["bf16"] = 0.5;     // 44 ms in total, which 67 ms of backward can hide
  const Prediction apart = predict_step(c, "bf16", 25);
  EXPECT_NEAR(apart.codec_ms, 0.5e-6 * 88'224'232, 1e-6);
  EXPECT_LT(apart.exposed_ms, 0.25 * apart.codec_ms);
  c.shared_cores = true;
  const double shared_ms = predict_step(c, "bf16", 25).step_ms;
  EXPECT_GE(shared_ms, 102 + apart.codec_ms - 1e-6);
  EXPECT_LE(shared_ms, 102 + 1.25 * apart.codec_ms);
  // A single bucket does not overlap.
  c.shared_cores = false;
  EXPECT_NEAR(predict_step(c, "bf16", 4000).exposed_ms, apart.codec_ms, 0.1);
  c.world = 1;
  EXPECT_EQ(predict_step(c, "bf16", 25).step_ms, 102);
  EXPECT_THROW(predict_step(c, "bf16:round=stochastic", 25), BadInput);
}

// Runs the whole examination with a small model. Every rank must reach the same result.
TEST(Recommend, EveryRankReachesTheSameResult) {
  TrainConfig config;
  config.batch_size = 2;
  config.devices.assign(3, Device::host());
  auto comms = Communicator::create_local(config.devices, std::chrono::seconds(60));
  std::vector<RanksReport> reports(3);
  run_local_ranks(comms, [&](Communicator& comm) {
    reports[comm.rank()] = examine_ranks(comm, config, {.patience = 0.02});
  });
  for (const RanksReport& report : reports) {
    EXPECT_EQ(report.links, reports[0].links);
    EXPECT_TRUE(report.links.measured);
    EXPECT_EQ(report.rank_tflops, reports[0].rank_tflops);
    EXPECT_EQ(report.costs.codec_ns, reports[0].costs.codec_ns);
    EXPECT_EQ(report.recommendation.chosen, reports[0].recommendation.chosen);
    ASSERT_EQ(report.pairs.size(), 9u);
    for (int a = 0; a < 3; ++a) {
      for (int b = 0; b < 3; ++b) {
        const PairSpeed &there = report.pairs[3 * a + b], &back = report.pairs[3 * b + a];
        EXPECT_EQ(there.latency_us, back.latency_us);
        EXPECT_EQ(there.gb_per_s > 0, a != b);
      }
    }
  }
  EXPECT_GT(reports[0].rank_tflops, 0);
  EXPECT_EQ(reports[0].parameters, count_elements(vit_parameters(config.model)));
  for (const auto& [spec, ns] : reports[0].costs.codec_ns) EXPECT_GT(ns, 0) << spec;
  const std::string text = links_text(reports[0]) + recommendation_text(reports[0], config.model);
  for (const char* word : {"rank 2", "GB/s", "compute", "Recommendation: ", "fp32"}) {
    EXPECT_NE(text.find(word), std::string::npos) << word << " is not in " << text;
  }
}

}  // namespace
}  // namespace gradwire::testing
