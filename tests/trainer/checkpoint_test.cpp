// Checkpoints: a resumed run has the bits of an uninterrupted run, and no state is lost when the number of
// ranks changes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>

#include "tests/support/devices.h"
#include "tests/support/own_codec.h"
#include "tests/support/thinned.h"
#include "tests/trainer/checkpoint_fixture.h"
#include "trainer/data/safetensors.h"

namespace gradwire::testing {
namespace {

namespace fs = std::filesystem;

class CheckpointTest : public CheckpointFixture {};
GW_INSTANTIATE_ON_DEVICES(CheckpointTest);

TEST_P(CheckpointTest, ResumingAtAnyStepGivesTheSameBits) {
  for (const char* spec : thinned({"fp32", "bf16:round=stochastic", "powersgd:rank=2,wire=bf16,start=2",
                                   "int8:residual=int8,dense=auto", "powersgd:rank=2,wire=bf16,residual=bf16",
                                   "powersgd:rank=2,alternate=on", "randk:ratio=0.1", "int4:ef=ef21,start=2",
                                   "topk:k=41,ef_decay=0.9,momentum=0.9,ramp=6"})) {
    for (int ranks : {1, 3}) {
      const std::string what = fmt::format("{}, {} ranks", spec, ranks);
      TrainConfig c = config(ranks, spec);
      if (ranks == 1) c.optimizer = OptimizerKind::sgd, c.accumulate = 2;
      if (ranks == 3 && std::string(spec) == "fp32") c.precision = Precision::bf16;
      if (c.compression.method == CompressionSpec::Method::powersgd) c.augment = {.flip = true, .crop = true};
      const Recorder whole = train(c);
      const Recorder saving = train_and_save(c);
      EXPECT_EQ(saving.losses, whole.losses) << what;
      EXPECT_EQ(saving.hash, whole.hash) << what;
      EXPECT_EQ(saving.saved, (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7})) << what;
      for (int64_t k : thinned({1, 2, 3, 4, 5, 6, 7})) {
        TrainConfig rest = c;
        rest.resume = checkpoint(k);
        rest.graph = k % 2 == 0 && (ranks == 1 || GetParam().is_host());
        rest.overlap_forward = k % 2 == 1;
        const Recorder resumed = train(rest);
        EXPECT_EQ(resumed.losses, std::vector<double>(whole.losses.begin() + k, whole.losses.end()))
            << what << ", from " << k;
        EXPECT_EQ(resumed.epochs, std::vector<int64_t>(whole.epochs.begin() + k, whole.epochs.end()));
        EXPECT_EQ(resumed.hash, whole.hash) << what << ", from " << k;
        EXPECT_EQ(resumed.eval_losses.back(), whole.eval_losses.back()) << what << ", from " << k;
      }
      if (!c.augment.any()) continue;
      TrainConfig plain = c;
      plain.augment = {};
      EXPECT_NE(train(plain).losses, whole.losses);
      plain.resume = checkpoint(c.steps);  // only evaluates, which never augments
      EXPECT_EQ(train(plain).eval_losses.back(), whole.eval_losses.back());
    }
  }
}

std::vector<double> sum_of(const std::vector<Restored>& ranks) {
  std::vector<double> sum(ranks[0].residual.size());
  for (const Restored& r : ranks) {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += double{r.residual[i]} + double{r.left[i]};
  }
  return sum;
}

TEST_P(CheckpointTest, ChangingTheNumberOfRanksKeepsTheSumOfTheResiduals) {
  for (const char* spec :
       thinned({"bf16", "powersgd:rank=1", "powersgd:rank=1,alternate=on", "randk:ratio=0.1"}, 2)) {
    const TrainConfig c = config(3, spec);
    train_and_save(c);
    const std::vector<double> expected = sum_of(restore(c, 3, GetParam(), checkpoint(4)));
    double largest = 0;
    for (double x : expected) largest = std::max(largest, std::abs(x));
    ASSERT_GT(largest, 0) << spec;
    for (int world : {1, 2, 4}) {
      const std::vector<double> sum = sum_of(restore(c, world, GetParam(), checkpoint(4)));
      for (size_t i = 0; i < sum.size(); ++i) {
        ASSERT_NEAR(sum[i], expected[i], 1e-6 * largest) << spec << ", " << world << " ranks, element " << i;
      }
    }
    // A codec without residuals receives them in its first gradients.
    TrainConfig plain = c;
    plain.compression = CompressionSpec::parse("fp32");
    const std::vector<Restored> left = restore(plain, 2, GetParam(), checkpoint(4));
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_NEAR(sum_of(left)[i], expected[i], 1e-6 * largest) << spec;
    }
  }
}

// Checks that the files have all state of a codec, of any kind and type, and that another bucket size can
// load the state. A change of the number of ranks preserves replicated state and the sum of the residuals.
TEST(Checkpoint, RestoresTheStateOfACustomCodec) {
  using Kept = std::map<std::pair<int, std::string>, std::vector<std::byte>>;
  const TemporaryFolder folder;
  TrainConfig config;
  config.model = tiny_model();
  config.compression = CompressionSpec::parse("bf16");
  config.checkpoint_directory = folder.path("run");
  const auto parameters = vit_parameters(config.model);
  // Each rank makes `steps` steps, saves or restores, and returns the state of its codecs.
  auto run = [&](int world, int64_t bucket_bytes, int steps, const std::string& from) {
    TrainConfig c = config;
    c.devices.assign(static_cast<size_t>(world), Device::host());
    std::vector<Kept> kept(world);
    run_ranks(world, Device::host(), [&](Communicator& comm) {
      CheckpointedRank rank(comm, c, {.bucket_bytes = bucket_bytes, .make_codec = make_own_codec});
      RankState state = rank.state();
      if (!from.empty()) restore_checkpoint(state, c, read_head(from));
      for (int step = 0; step < steps; ++step) rank.step(step);
      if (from.empty()) save_checkpoint(state, c, {.step = steps});
      for (const TensorState& s : rank.reducer.tensor_state()) {
        std::vector<std::byte>& bytes = kept[comm.rank()][{s.tensor, s.kind}];
        bytes.resize(static_cast<size_t>(s.bytes()));
        s.read(rank.stream, 0, bytes);
        rank.stream.synchronize();
      }
    });
    return kept;
  };
  const std::vector<Kept> saved = run(2, 1000, 3, "");
  const std::string checkpoint = NewCheckpoint::final_path(config.checkpoint_directory, 3);
  EXPECT_EQ(run(2, 1000, 0, checkpoint), saved);
  EXPECT_EQ(run(2, 1 << 20, 0, checkpoint), saved) << "all in one bucket";
  const SafetensorsReader common(state_path(checkpoint, 0, 2)), other(state_path(checkpoint, 1, 2));
  const SafetensorsReader::Tensor* velocity = common.find("velocity." + parameters[0].name);
  ASSERT_NE(velocity, nullptr);
  EXPECT_EQ(velocity->dtype, "F64");
  EXPECT_EQ(other.find("velocity." + parameters[0].name), nullptr) << "rank 0 has saved it";
  ASSERT_NE(other.find("seen." + parameters[0].name), nullptr);
  EXPECT_EQ(other.find("seen." + parameters[0].name)->dtype, "I16");

  const std::vector<Kept> more = run(3, 1000, 0, checkpoint);
  for (int i = 0; i < static_cast<int>(parameters.size()); ++i) {
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(more[r].at({i, "velocity"}), saved[0].at({i, "velocity"}));
      EXPECT_EQ(more[r].at({i, "seen"}),
                (std::vector<std::byte>{std::byte(100 * r), std::byte{0}, std::byte(100 * r), std::byte{0}}))
          << "per-rank state starts again";
      if (r < 2) {
        EXPECT_EQ(more[r].at({i, kResidualKind}), saved[r].at({i, kResidualKind}));
      }
    }
  }
}

// Makes one step of plain SGD with residuals and one step without. The weights must differ by lr times the
// sum of all ranks' residuals.
TEST_P(CheckpointTest, FirstStepInAWorldOfOneAppliesTheRestoredResiduals) {
  TrainConfig c = config(3, "bf16");
  c.optimizer = OptimizerKind::sgd;
  c.momentum = 0, c.weight_decay = 0, c.warmup_steps = 0, c.lr = 0.5, c.eval_every = 0;
  train_and_save(c);
  const std::vector<double> residual = sum_of(restore(c, 3, GetParam(), checkpoint(4)));
  auto one_step = [&](const std::string& from, const std::string& to) {
    TrainConfig alone = c;
    alone.devices.resize(1);
    alone.steps = 5;
    alone.accumulate = 2;  // the step adds the residuals once, not once per micro-batch
    alone.resume = from;
    alone.checkpoint_directory = folder_.path(to);
    alone.checkpoint_every = 1;
    train(alone);
    return weights_in(weights_path(NewCheckpoint::final_path(folder_.path(to), 5)));
  };
  const std::vector<float> with = one_step(checkpoint(4), "with");
  // A copy of the checkpoint without residuals.
  const std::string bare = folder_.path("bare");
  fs::create_directory(bare);
  fs::copy_file(weights_path(checkpoint(4)), weights_path(bare));
  for (int r = 0; r < 3; ++r) {
    const SafetensorsReader full(state_path(checkpoint(4), r, 3));
    auto metadata = full.metadata();
    metadata.erase("crc32");
    SafetensorsWriter(state_path(bare, r, 3), metadata, {}).finish();
  }
  const std::vector<float> without = one_step(bare, "without");
  const double lr = 0.5 * (1 + std::cos(std::acos(-1.0) * 4 / 5)) / 2;
  double largest = 0;
  for (size_t i = 0; i < with.size(); ++i) {
    // with[i] and the weight without residuals are rounded to FP32.
    const double rounding = 2e-7 * std::max(1.0f, std::abs(with[i]));
    ASSERT_NEAR(without[i] - with[i], lr * residual[i], rounding) << i << ", a weight of " << with[i];
    largest = std::max(largest, std::abs(lr * residual[i]));
  }
  EXPECT_GT(largest, 1e-5);  // the residuals exceed the tolerance
}

TEST_P(CheckpointTest, ShardedRunsResumeWithTheSameBits) {
  for (const char* format : thinned({"int8", "fp32"}, 1)) {
    for (const char* spec : {"fp32", "int8"}) {
      const std::string what = fmt::format("{}, weights in {}", spec, format);
      TrainConfig c = config(3, spec);
      c.shard_optimizer = true;
      c.bucket_mb = 0.003;
      c.gather_weights = CompressionSpec::parse(format).wire;
      const Recorder whole = train(c);
      EXPECT_EQ(train_and_save(c).hash, whole.hash) << what;
      for (int64_t k : thinned({1, 2, 3, 4, 5, 6, 7})) {
        TrainConfig rest = c;
        rest.resume = checkpoint(k);
        rest.graph = k % 2 == 0 && GetParam().is_host();
        const Recorder resumed = train(rest);
        EXPECT_EQ(resumed.hash, whole.hash) << what << ", from " << k;
      }
    }
  }
}

// Checks that a checkpoint does not depend on the sharding of the moments.
TEST_P(CheckpointTest, CheckpointsDoNotDependOnSharding) {
  TrainConfig c = config(3, "fp32:schedule=two_shot");
  const Recorder whole = train(c);
  for (bool saved : {false, true}) {
    c.shard_optimizer = saved;
    train_and_save(c);
    for (bool resumed : {false, true}) {
      TrainConfig rest = c;
      rest.shard_optimizer = resumed;
      EXPECT_EQ(train_from(rest, checkpoint(4)).hash, whole.hash);
    }
  }
  // With other numbers of ranks, the training continues identically, however the moments are sharded.
  for (int ranks : {1, 2}) {
    TrainConfig rest = c;
    rest.devices.resize(static_cast<size_t>(ranks), GetParam());
    rest.resume = checkpoint(4);
    rest.shard_optimizer = false;
    const Recorder undivided = train(rest);
    rest.shard_optimizer = true;
    EXPECT_EQ(train(rest).hash, undivided.hash) << ranks;
  }
}

TEST_P(CheckpointTest, SumOfResidualsDoesNotDependOnSharding) {
  TrainConfig c = config(3, "int4:dense=off");
  c.bucket_mb = 0.003;
  c.checkpoint_directory = folder_.path("run");
  // Makes steps and saves, or restores. Returns the sum over the ranks of every element's residual.
  auto run = [&](int ranks, bool sharded, const std::string& from) {
    TrainConfig config = c;
    config.shard_optimizer = sharded;
    config.devices.assign(static_cast<size_t>(ranks), GetParam());
    std::vector<double> sum;
    std::mutex mutex;
    run_ranks(ranks, GetParam(), [&](Communicator& comm) {
      CheckpointedRank rank(comm, config, reducer_options(config));
      if (!from.empty()) {
        EXPECT_FALSE(restore_checkpoint(rank.state(), config, read_head(from)));
      } else {
        rank.step(0);
        save_checkpoint(rank.state(), config, {.step = 1});
      }
      const std::vector<float> residual = rank.residual();
      std::lock_guard lock(mutex);
      sum.resize(residual.size());
      for (size_t e = 0; e < sum.size(); ++e) sum[e] += residual[e];
    });
    return sum;
  };
  const std::string saved = NewCheckpoint::final_path(c.checkpoint_directory, 1);
  for (bool before : {false, true}) {
    fs::remove_all(folder_.path("run"));
    const std::vector<double> sum = run(3, before, "");
    EXPECT_GT(norm(sum), 1);
    for (bool after : {false, true}) {
      for (int ranks : {2, 3, 5}) {
        const std::vector<double> kept = run(ranks, after, saved);
        std::vector<double> difference(sum.size());
        for (size_t e = 0; e < sum.size(); ++e) difference[e] = kept[e] - sum[e];
        EXPECT_LE(norm(difference), 1e-6 * norm(sum)) << after << ", " << ranks;
      }
    }
  }
}

// Checks that a resumed FP32 run, which has no residuals, adds the checkpoint's residuals to the first step's
// gradients.
TEST_P(CheckpointTest, FirstStepAppliesResidualsThatFp32CannotKeep) {
  TrainConfig c = config(3, "int4:dense=off");
  train_and_save(c);
  TrainConfig rest = config(3, "fp32:schedule=two_shot");
  rest.resume = checkpoint(4);
  const Recorder undivided = train(rest);
  rest.shard_optimizer = true;
  for (double bucket_mb : {25.0, 0.003}) {
    rest.bucket_mb = bucket_mb;
    EXPECT_EQ(train(rest).hash, undivided.hash) << bucket_mb;
  }
}

}  // namespace
}  // namespace gradwire::testing
