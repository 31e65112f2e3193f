// Training with Dion: in every number of ranks, also one, the codec turns gradients into steps. And with
// Muon, whose steps the oracle test compares with NumPy's.
#include <fmt/format.h>

#include "runtime/util/error.h"
#include "tests/support/devices.h"
#include "tests/support/expect.h"
#include "tests/trainer/checkpoint_fixture.h"
#include "tests/trainer/files.h"
#include "trainer/cli/flags.h"

namespace gradwire::testing {
namespace {

class DionTrainTest : public ::testing::TestWithParam<Device> {
 protected:
  TrainConfig config(int ranks, const char* spec) const {
    TrainConfig config = run_config(small_model(), ranks, GetParam(), spec);
    config.batch_size = 8;
    config.steps = 90;
    config.warmup_steps = 3;
    config.lr = 3e-3;
    config.dion_lr = 0.02;
    config.seed = 5;
    config.timeout_s = 60;
    return config;
  }
  Recorder train(const TrainConfig& config) const { return testing::train(config, data_); }
  const DataSplits data_ = make_synthetic(small_model(), 192, 50, 1);
};
GW_INSTANTIATE_ON_DEVICES(DionTrainTest);

TEST_P(DionTrainTest, LearnsInEveryFormatAndWorld) {
  for (const auto& [spec, ranks] : {std::pair("dion:rank=4", 1), std::pair("dion:rank=4", 4),
                                    std::pair("dion:rank=4,wire=int8,dense=auto+conv_proj.weight", 2)}) {
    const Recorder r = train(config(ranks, spec));
    EXPECT_LT(r.steps.back().loss, 0.5) << spec;
    EXPECT_GT(r.evals.back().test_accuracy, 0.8) << spec;
  }
}

TEST_P(DionTrainTest, ShardsGraphsAndOverlapGiveTheSameBits) {
  TrainConfig c = config(3, "dion:rank=3,schedule=two_shot");
  c.steps = 8;
  c.bucket_mb = 0.003;
  const Recorder plain = train(c);
  TrainConfig sharded = c, graph = c, overlap = c;
  sharded.shard_optimizer = true;
  graph.graph = GetParam().is_host();
  overlap.overlap_forward = true;
  for (const TrainConfig& other : {sharded, graph, overlap}) {
    const Recorder r = train(other);
    EXPECT_EQ(r.losses, plain.losses);
    EXPECT_EQ(r.hash, plain.hash);
  }
}

TEST_P(DionTrainTest, MuonLearnsInEveryWorldAndAGraphGivesTheSameBits) {
  for (const auto& [spec, ranks] : {std::pair("fp32", 1), std::pair("int8", 3)}) {
    TrainConfig c = config(ranks, spec);
    c.muon = true;
    const Recorder r = train(c);
    EXPECT_LT(r.steps.back().loss, 1.0) << spec;
    c.graph = GetParam().is_host();
    EXPECT_EQ(train(c).hash, r.hash) << spec;
    c.muon_mu = 0.5;
    EXPECT_NE(train(c).hash, r.hash) << spec;
  }
}

class DionCheckpointTest : public CheckpointFixture {};
GW_INSTANTIATE_ON_DEVICES(DionCheckpointTest);

TEST_P(DionCheckpointTest, ResumingGivesTheSameBits) {
  for (int ranks : {1, 3}) {
    for (const bool muon : {false, true}) {
      TrainConfig c = config(ranks, muon ? "int8" : "dion:rank=2,wire=int8");
      c.muon = muon;
      const Recorder whole = train(c);
      train_and_save(c);
      for (int64_t k : {1, 4}) {
        TrainConfig rest = c;
        rest.resume = checkpoint(k);
        EXPECT_EQ(train(rest).hash, whole.hash) << ranks << " ranks, from " << k;
      }
    }
  }
}

// The momentum of the mean gradient is the sum over the ranks, in any world.
TEST_P(DionCheckpointTest, AnotherNumberOfRanksKeepsTheSumOfTheMomenta) {
  const TrainConfig c = config(3, "dion:rank=2");
  train_and_save(c);
  const auto sum_of = [&](int world) {
    std::vector<double> sum;
    for (const Restored& r : restore(c, world, GetParam(), checkpoint(4))) {
      sum.resize(r.residual.size());
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += double{r.residual[i]};
      for (float x : r.left) EXPECT_EQ(x, 0.0f);
    }
    return sum;
  };
  const std::vector<double> want = sum_of(3);
  for (int world : {1, 2, 4}) {
    const std::vector<double> got = sum_of(world);
    for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-6) << world << " ranks";
  }
}

TEST(DionOptions, ComposeWithTheWireFormat) {
  const auto resolved = [](const char* optimizer, const char* compression, bool shard_optimizer = false) {
    RunOptions o;
    o.data_text = "synthetic";
    o.device = DeviceChoice::host;
    if (*optimizer != '\0') o.optimizer_text = optimizer;
    if (*compression != '\0') o.specs = {compression};
    o.shard_optimizer = shard_optimizer;
    return resolve_machine(o).config;
  };
  const TrainConfig config = resolved("dion:rank=8,mu=0.9,lr=0.02", "int8:schedule=ring");
  EXPECT_EQ(config.dion_lr, 0.02);
  EXPECT_EQ(config.compression.to_string(),
            "dion:rank=8,mu=0.9,wire=int8,dense=conv_proj.weight+heads.head.weight,schedule=ring");
  EXPECT_EQ(resolved("dion:rank=8", "").dion_lr, 0.01);
  expect_bad_input([&] { resolved("dion:rank=8,lr=x", ""); }, {"--optimizer", "lr="});
  expect_bad_input([&] { resolved("dion:rank=8,wire=int8", ""); }, {"rank=, mu=, orth= and lr="});
  expect_bad_input([&] { resolved("dion:rank=8", "powersgd:rank=2"); }, {"--compression powersgd:rank=2"});
  expect_bad_input([&] { resolved("", "dion:rank=2"); }, {"--optimizer dion:rank=R"});
  EXPECT_TRUE(resolved("dion:lr=0.5,rank=8,orth=on", "").compression.orth);
  EXPECT_EQ(resolved("dion:lr=0.5,rank=8,orth=on", "").dion_lr, 0.5);
  const TrainConfig muon = resolved("muon:mu=0.9,lr=0.03", "topk:k=41");
  EXPECT_TRUE(muon.muon);
  EXPECT_EQ(std::pair(muon.muon_mu, muon.dion_lr), std::pair(0.9, 0.03));
  EXPECT_EQ(muon.compression.to_string(), "topk:k=41");
  expect_bad_input([&] { resolved("muon:mu=2", ""); }, {"mu=", "0 to 1"});
  expect_bad_input([&] { resolved("muon:rank=2", ""); }, {"muon:rank=2", "mu= and lr="});
  expect_bad_input([&] { resolved("muon", "", true); }, {"--shard", "muon"});
}

}  // namespace
}  // namespace gradwire::testing
