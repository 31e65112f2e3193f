// Checkpoints: a resumed run has the bits of an uninterrupted run, nothing is lost when the number of ranks
// changes, and damaged files are rejected.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <future>
#include <map>
#include <random>

#include "collectives/communicator/communicator.h"
#include "tests/collectives/conservation.h"
#include "tests/collectives/group.h"
#include "tests/support/devices.h"
#include "tests/support/own_codec.h"
#include "tests/support/thinned.h"
#include "tests/trainer/files.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/checkpoint/head.h"
#include "trainer/checkpoint/safetensors.h"
#include "trainer/config/run.h"
#include "trainer/data/dataset.h"
#include "trainer/log/json.h"
#include "trainer/train/layout.h"
#include "trainer/train/optimizer.h"

namespace gradwire {
namespace {

namespace fs = std::filesystem;
using testing::Bytes;
using testing::expect_bad_input;
using testing::read_bytes;
using testing::TemporaryFolder;
using testing::thinned;
using testing::write_bytes;

struct Recorder : RunObserver {
  void on_step(const StepRecord& s) override { losses.push_back(s.loss), epochs.push_back(s.epoch); }
  void on_eval(const EvalRecord& e) override { evals.push_back(e.test_loss); }
  void on_checkpoint(const CheckpointRecord& c) override { saved.push_back(c.step); }
  void on_end(const EndRecord& e) override { hash = e.parameter_hash; }
  std::vector<double> losses, evals;
  std::vector<int64_t> epochs, saved;
  uint64_t hash = 0;
};

VitConfig tiny_model() {
  VitConfig model{.name = "tiny"};
  model.image = 4, model.patch = 2, model.channels = 1, model.classes = 4;
  model.width = 8, model.depth = 1, model.heads = 2, model.mlp = 16;
  return model;
}

class CheckpointTest : public ::testing::TestWithParam<Device> {
 protected:
  TrainConfig config(int ranks, const char* spec) const {
    TrainConfig config;
    config.model = tiny_model();
    config.devices.assign(static_cast<size_t>(ranks), GetParam());
    config.compression = CompressionSpec::parse(spec);
    config.batch_size = 4;
    config.steps = 7;
    config.warmup_steps = 2;
    config.lr = 1e-2;
    config.weight_decay = 0.01;
    config.seed = 3;
    config.eval_batch_size = 8;
    return config;
  }
  Recorder train(const TrainConfig& config) const {
    Recorder recorder;
    run_training(config, data_, recorder);
    return recorder;
  }
  // Saves after every step and keeps all checkpoints.
  Recorder train_and_save(TrainConfig config) const {
    config.checkpoint_directory = folder_.path("run");
    config.checkpoint_every = 1;
    config.checkpoint_keep = 100;
    return train(config);
  }
  std::string checkpoint(int64_t step) const { return NewCheckpoint::final_path(folder_.path("run"), step); }

  TemporaryFolder folder_;
  // 3 ranks have 3 steps per epoch, 1 rank has 9.
  const DataSplits data_ = make_synthetic(tiny_model(), 38, 10, 1);
};
GW_INSTANTIATE_ON_DEVICES(CheckpointTest);

TEST_P(CheckpointTest, ResumingAtAnyStepGivesTheSameBits) {
  for (const char* spec : thinned({"fp32", "bf16:round=stochastic", "powersgd:rank=2,wire=bf16,start=2",
                                   "int8:residual=int8,dense=auto", "powersgd:rank=2,wire=bf16,residual=bf16",
                                   "powersgd:rank=2,alternate=on", "randk:ratio=0.1"})) {
    for (int ranks : {1, 3}) {
      const std::string what = fmt::format("{}, {} ranks", spec, ranks);
      TrainConfig c = config(ranks, spec);
      if (ranks == 1) c.optimizer = OptimizerKind::sgd, c.accumulate = 2;
      if (ranks == 3 && std::string(spec) == "fp32") c.precision = Precision::bf16;
      if (c.compression.method == CompressionSpec::Method::powersgd) c.augment = {.flip = true, .crop = true};
      const Recorder whole = train(c);
      fs::remove_all(folder_.path("run"));
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
        EXPECT_EQ(resumed.evals.back(), whole.evals.back()) << what << ", from " << k;
      }
      if (!c.augment.any()) continue;
      TrainConfig plain = c;
      plain.augment = {};
      EXPECT_NE(train(plain).losses, whole.losses);
      plain.resume = checkpoint(c.steps);  // only evaluates, which never augments
      EXPECT_EQ(train(plain).evals.back(), whole.evals.back());
    }
  }
}

// The initial state of a rank of a resumed run: residuals in the model's layout, values left in its
// gradients, weights and moments.
struct Restored {
  std::vector<float> residual, left;
  std::vector<std::vector<float>> trained;
  bool operator==(const Restored&) const = default;
};
Restored restore_rank(const TrainConfig& config, Communicator& comm, const std::string& from) {
  const CheckpointHead head = read_head(from);
  const Stream stream = Stream::create(comm.device(), "restore");
  Reducer reducer(comm, config.compression, gradient_tensors(config.model), {.seed = config.seed});
  const ParameterLayout layout = reducer_layout(reducer);
  const Optimizer optimizer(config, stream, {{0, layout.elements}});
  const Buffer weights = make_buffer<float>(comm.device(), layout.elements);
  const auto parameters = vit_parameters(config.model);
  const bool left = restore_checkpoint({.comm = comm,
                                        .stream = stream,
                                        .reducer = reducer,
                                        .parameters = parameters,
                                        .layout = layout,
                                        .weights = {weights.as<float>()},
                                        .moments = optimizer.moments(),
                                        .parts = {{0, layout.elements}},
                                        .left_over = [&] { return reducer.gradients().as<float>(); }},
                                       config, head);
  Restored out;
  out.residual.assign(static_cast<size_t>(layout.elements), 0.0f);
  for (const TensorState& s : reducer.tensor_state()) {
    if (s.kind != kResidualKind) continue;
    std::vector<float> values(static_cast<size_t>(s.count()));
    s.read(stream, 0, std::as_writable_bytes(std::span(values)));
    stream.synchronize();
    std::copy(values.begin(), values.end(), out.residual.begin() + layout.offsets[s.tensor]);
  }
  out.left = to_host<float>(stream, reducer.gradients().as<float>(), layout.elements);
  out.trained.push_back(to_host<float>(stream, weights.as<float>(), layout.elements));
  for (const auto& moment : optimizer.moments()) {
    out.trained.push_back(to_host<float>(stream, moment.values.data, layout.elements));
  }
  EXPECT_EQ(left, std::any_of(out.left.begin(), out.left.end(), [](float x) { return x != 0; }));
  return out;
}

std::vector<Restored> restore(TrainConfig config, int world, Device device, const std::string& from) {
  config.devices.assign(static_cast<size_t>(world), device);
  auto comms = Communicator::create_local(config.devices, std::chrono::seconds(60));
  std::vector<std::future<Restored>> ranks;
  for (auto& comm : comms) {
    ranks.push_back(std::async(std::launch::async, [&] { return restore_rank(config, *comm, from); }));
  }
  std::vector<Restored> all;
  for (auto& rank : ranks) all.push_back(rank.get());
  return all;
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
    fs::remove_all(folder_.path("run"));
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

// All state of a codec, of any kind and type, is in the files and fits another bucket size. When the number
// of ranks changes, replicated state is kept, and so is the sum of the residuals.
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
    std::vector<Kept> kept(static_cast<size_t>(world));
    testing::run_ranks(world, Device::host(), [&](Communicator& comm) {
      const Stream stream = Stream::create(comm.device(), "train");
      Reducer reducer(comm, c.compression, gradient_tensors(c.model),
                      {.bucket_bytes = bucket_bytes, .make_codec = testing::make_own_codec});
      const ParameterLayout layout = reducer_layout(reducer);
      const Buffer weights = make_buffer<float>(comm.device(), layout.elements);
      fill_zero(stream, weights.data(), weights.bytes());
      const RankState rank{.comm = comm,
                           .stream = stream,
                           .reducer = reducer,
                           .parameters = parameters,
                           .layout = layout,
                           .weights = {weights.as<float>()},
                           .moments = {},
                           .parts = {{0, layout.elements}},
                           .left_over = [&] { return reducer.gradients().as<float>(); }};
      if (!from.empty()) restore_checkpoint(rank, c, read_head(from));
      for (int step = 0; step < steps; ++step) {
        for (int i = 0; i < reducer.tensors(); ++i) {
          const auto seed = static_cast<uint32_t>(1000 * step + 100 * comm.rank() + i);
          const auto gradient = testing::normal(parameters[static_cast<size_t>(i)].elements(), seed);
          to_device(stream, reducer.gradient(i), std::span<const float>(gradient));
          reducer.ready(i, stream);
        }
        reducer.wait(stream);
      }
      stream.synchronize();
      if (from.empty()) save_checkpoint(rank, c, {.step = steps});
      for (const TensorState& s : reducer.tensor_state()) {
        std::vector<std::byte>& bytes = kept[static_cast<size_t>(comm.rank())][{s.tensor, s.kind}];
        bytes.resize(static_cast<size_t>(s.bytes()));
        s.read(stream, 0, bytes);
        stream.synchronize();
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

std::vector<float> weights_of(const std::string& path) {
  const auto parameters = vit_parameters(tiny_model());
  const ParameterLayout layout = packed_layout(parameters);
  std::vector<float> values(static_cast<size_t>(layout.elements));
  load_weights(path, parameters, layout, true, values);
  return values;
}

// One step of plain SGD, with residuals and without: the weights differ by lr times the sum of all ranks'
// residuals.
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
    alone.accumulate = 2;  // once, not once per micro-batch
    alone.resume = from;
    alone.checkpoint_directory = folder_.path(to);
    alone.checkpoint_every = 1;
    train(alone);
    return weights_of(weights_path(NewCheckpoint::final_path(folder_.path(to), 5)));
  };
  const std::vector<float> with = one_step(checkpoint(4), "with");
  // The same checkpoint without its residuals.
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
    // Both are weights rounded to FP32.
    const double rounding = 2e-7 * std::max(1.0f, std::abs(with[i]));
    ASSERT_NEAR(without[i] - with[i], lr * residual[i], rounding) << i << ", a weight of " << with[i];
    largest = std::max(largest, std::abs(lr * residual[i]));
  }
  EXPECT_GT(largest, 1e-5);  // the residuals exceed the tolerance
}

TEST_P(CheckpointTest, ShardedRunsResumeWithTheSameBits) {
  for (const char* format : thinned({"int8", "fp32"}, 1)) {
    for (const auto& [spec, shard] :
         {std::pair("fp32", Sharding::optimizer), std::pair("int8", Sharding::optimizer),
          std::pair("int8", Sharding::gradients), std::pair("int8", Sharding::full)}) {
      const std::string what = fmt::format("{}, weights in {}, {} divided", spec, format, name(shard));
      TrainConfig c = config(3, spec);
      c.shard = shard;
      c.bucket_mb = 0.003;
      c.gather_weights = CompressionSpec::parse(format).wire;
      const Recorder whole = train(c);
      fs::remove_all(folder_.path("run"));
      EXPECT_EQ(train_and_save(c).hash, whole.hash) << what;
      for (int64_t k : thinned({1, 2, 3, 4, 5, 6, 7})) {
        TrainConfig rest = c;
        rest.resume = checkpoint(k);
        rest.graph = shard == Sharding::optimizer && k % 2 == 0 && GetParam().is_host();
        const Recorder resumed = train(rest);
        EXPECT_EQ(resumed.hash, whole.hash) << what << ", from " << k;
      }
    }
  }
}

// Each rank writes its part, and no rank needs memory for the whole.
TEST_P(CheckpointTest, RanksOfAShardedRunWriteTheirShards) {
  constexpr int kRanks = 3;
  TrainConfig c = config(kRanks, "fp32");
  c.bucket_mb = 0.003;
  c.shard = Sharding::optimizer;
  c.checkpoint_directory = folder_.path("run");
  const auto parameters = vit_parameters(c.model);
  std::array<uint64_t, kRanks> bytes{};
  testing::run_ranks(kRanks, GetParam(), [&](Communicator& comm) {
    const Stream stream = Stream::create(comm.device(), "train");
    Reducer reducer(comm, c.compression, gradient_tensors(c.model), reducer_options(c));
    const ParameterLayout layout = reducer_layout(reducer);
    const Optimizer optimizer(c, stream, reducer.owned());
    // The value of an element is its index in the layout. The elements of other ranks are wrong here.
    const Buffer weights = make_buffer<float>(comm.device(), layout.elements);
    std::vector<float> mine(static_cast<size_t>(layout.elements), -1.0f), moments;
    for (const ElementRange& part : reducer.owned()) {
      for (int64_t e = part.begin; e < part.end; ++e) {
        mine[static_cast<size_t>(e)] = static_cast<float>(e);
        moments.push_back(static_cast<float>(-e));
      }
    }
    to_device(stream, weights.as<float>(), std::span<const float>(mine));
    for (const FlatState& moment : optimizer.moments())
      to_device(stream, moment.values.data, std::span<const float>(moments));
    const SavedCheckpoint saved = save_checkpoint({.comm = comm,
                                                   .stream = stream,
                                                   .reducer = reducer,
                                                   .parameters = parameters,
                                                   .layout = layout,
                                                   .weights = {weights.as<float>()},
                                                   .moments = optimizer.moments(),
                                                   .parts = reducer.owned(),
                                                   .divided = true},
                                                  c, {.step = 1});
    bytes[static_cast<size_t>(comm.rank())] = saved.bytes;
    if (comm.rank() != 0) return;
    const SafetensorsReader model(weights_path(saved.path)), state(state_path(saved.path, 0, kRanks));
    model.verify(true), state.verify(true);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const std::string& name = parameters[i].name;
      std::vector<float> weight(static_cast<size_t>(parameters[i].elements())), m(weight.size());
      model.read(*model.find(name), 0, weight);
      state.read(*state.find("optimizer.m." + name), 0, m);
      for (size_t e = 0; e < weight.size(); ++e) {
        const float index = static_cast<float>(layout.offsets[i]) + static_cast<float>(e);
        ASSERT_EQ(weight[e], index) << name << ", element " << e;
        ASSERT_EQ(m[e], -index) << name << ", element " << e;
      }
    }
  });
  const auto whole = static_cast<double>(3 * sizeof(float) * count_elements(parameters));
  for (uint64_t written : bytes) {
    EXPECT_GT(static_cast<double>(written), 0.9 * whole / kRanks);
    EXPECT_LT(static_cast<double>(written), 1.1 * whole / kRanks + 30e3) << "headers included";
  }
}

// A checkpoint does not depend on how the moments were sharded.
TEST_P(CheckpointTest, CheckpointsDoNotDependOnSharding) {
  TrainConfig c = config(3, "fp32:schedule=two_shot");
  const Recorder whole = train(c);
  constexpr Sharding kAll[] = {Sharding::none, Sharding::optimizer, Sharding::gradients, Sharding::full};
  for (Sharding saved : thinned(kAll)) {
    fs::remove_all(folder_.path("run"));
    c.shard = saved;
    train_and_save(c);
    for (Sharding resumed : thinned(kAll, 2)) {
      TrainConfig rest = c;
      rest.shard = resumed;
      rest.resume = checkpoint(4);
      EXPECT_EQ(train(rest).hash, whole.hash);
    }
  }
  // In other worlds, the training continues identically, however the moments are sharded.
  for (int ranks : {1, 2}) {
    TrainConfig rest = c;
    rest.devices.resize(static_cast<size_t>(ranks), GetParam());
    rest.resume = checkpoint(4);
    rest.shard = Sharding::none;
    const Recorder undivided = train(rest);
    for (Sharding shard : thinned(kAll, 2)) {
      rest.shard = shard;
      EXPECT_EQ(train(rest).hash, undivided.hash) << ranks << ", " << name(shard);
    }
  }
}

TEST_P(CheckpointTest, SumOfResidualsDoesNotDependOnSharding) {
  TrainConfig c = config(3, "int4:dense=off");
  c.bucket_mb = 0.003;
  c.checkpoint_directory = folder_.path("run");
  const auto parameters = vit_parameters(c.model);
  // Makes steps and saves, or restores. Returns the sum over the ranks of every element's residual.
  auto run = [&](int ranks, Sharding shard, const std::string& from) {
    TrainConfig config = c;
    config.shard = shard;
    config.devices.assign(static_cast<size_t>(ranks), GetParam());
    std::vector<double> sum;
    std::mutex mutex;
    testing::run_ranks(ranks, GetParam(), [&](Communicator& comm) {
      const Stream stream = Stream::create(comm.device(), "train");
      Reducer reducer(comm, config.compression, gradient_tensors(config.model), reducer_options(config));
      const ParameterLayout layout = reducer_layout(reducer);
      Buffer weights = Buffer::pinned(comm.device(), static_cast<size_t>(layout.elements) * sizeof(float));
      const RankState rank{.comm = comm,
                           .stream = stream,
                           .reducer = reducer,
                           .parameters = parameters,
                           .layout = layout,
                           .weights = {weights.as<float>()},
                           .moments = {},
                           .parts = {{0, layout.elements}}};
      if (!from.empty()) {
        EXPECT_FALSE(restore_checkpoint(rank, config, read_head(from)));
      } else {
        for (int i = 0; i < reducer.tensors(); ++i) {
          const auto seed = static_cast<uint32_t>(100 * comm.rank() + i);
          const auto gradient = testing::normal(parameters[static_cast<size_t>(i)].elements(), seed);
          to_device(stream, reducer.gradient(i), std::span<const float>(gradient));
          reducer.ready(i, stream);
        }
        reducer.wait(stream);
        stream.synchronize();
        save_checkpoint(rank, config, {.step = 1});
      }
      std::lock_guard lock(mutex);
      sum.resize(static_cast<size_t>(layout.elements));
      for (const TensorState& state : reducer.tensor_state()) {
        if (state.kind != kResidualKind) continue;
        const auto part = testing::values_of(stream, state);
        for (size_t e = 0; e < part.size(); ++e)
          sum[static_cast<size_t>(reducer.offset(state.tensor)) + e] += part[e];
      }
    });
    return sum;
  };
  const std::string saved = NewCheckpoint::final_path(c.checkpoint_directory, 1);
  for (Sharding before : {Sharding::gradients, Sharding::full}) {
    fs::remove_all(folder_.path("run"));
    const std::vector<double> sum = run(3, before, "");
    EXPECT_GT(testing::norm(sum), 1);
    for (Sharding after : {Sharding::none, Sharding::optimizer, Sharding::full}) {
      for (int ranks : {2, 3, 5}) {
        const std::vector<double> kept = run(ranks, after, saved);
        std::vector<double> difference(sum.size());
        for (size_t e = 0; e < sum.size(); ++e) difference[e] = kept[e] - sum[e];
        EXPECT_LE(testing::norm(difference), 1e-6 * testing::norm(sum)) << name(after) << ", " << ranks;
      }
    }
  }
}

// FP32 has no residuals: they are added to the first step's gradients.
TEST_P(CheckpointTest, FirstStepAppliesResidualsThatFp32CannotKeep) {
  TrainConfig c = config(3, "int4:dense=off");
  train_and_save(c);
  TrainConfig rest = config(3, "fp32:schedule=two_shot");
  rest.resume = checkpoint(4);
  const Recorder undivided = train(rest);
  for (Sharding shard : {Sharding::optimizer, Sharding::gradients, Sharding::full}) {
    for (double bucket_mb : {25.0, 0.003}) {
      rest.shard = shard;
      rest.bucket_mb = bucket_mb;
      EXPECT_EQ(train(rest).hash, undivided.hash) << name(shard) << ", " << bucket_mb;
    }
  }
}

// Twice the expected number of bytes, in a file with a correct checksum.
TEST_P(CheckpointTest, RejectsMomentsOfAnotherType) {
  const TrainConfig c = config(1, "fp32");
  train_and_save(c);
  const std::string path = state_path(checkpoint(4), 0, 1);
  const SafetensorsReader good(path);
  std::vector<SafetensorsWriter::Entry> entries;
  uint64_t bytes = 0;
  for (const SafetensorsReader::Tensor& tensor : good.tensors()) {
    entries.push_back({tensor.name, tensor.shape, DType::f64});
    bytes += 2 * tensor.bytes;
  }
  auto metadata = good.metadata();
  metadata.erase("crc32");
  fs::remove(path);
  SafetensorsWriter writer(path, metadata, entries);
  writer.write(std::vector<std::byte>(bytes));
  writer.finish();
  TrainConfig rest = c;
  rest.resume = checkpoint(4);
  expect_bad_input([&] { train(rest); }, {"of F64, expected"});
}

TEST_P(CheckpointTest, InitializesARunWithTheWeightsOfACheckpoint) {
  TrainConfig c = config(2, "fp32");
  train_and_save(c);
  c.init = weights_path(checkpoint(7));
  c.lr = 0, c.weight_decay = 0, c.steps = 1, c.eval_every = 0;
  c.checkpoint_directory = folder_.path("again");
  c.checkpoint_every = 1;
  train(c);
  EXPECT_EQ(weights_of(weights_path(NewCheckpoint::final_path(folder_.path("again"), 1))),
            weights_of(c.init));

  VitConfig other = c.model;
  other.mlp = 24, other.depth = 2;
  expect_bad_input(
      [&] { check_weights(c.init, other); },
      {c.init, "missing", "encoder_layer_1", "mlp.0.weight (16x8 in the file, 24x8 in the model)"});
  other = c.model;
  other.depth = 0;
  expect_bad_input([&] { check_weights(c.init, other); },
                   {c.init, "unexpected: encoder.layers.encoder_layer_0."});
}

TEST_P(CheckpointTest, KeepsTheLatestAndSkipsUnfinishedOnes) {
  TrainConfig c = config(2, "bf16");
  const std::string run = folder_.path("run");
  c.checkpoint_directory = run;
  c.checkpoint_every = 2;
  c.checkpoint_keep = 2;
  fs::create_directories(run + "/step-000000002.tmp");  // left by a killed run
  fs::create_directories(run + "/not-ours");
  train(c);
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(run)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"lock", "not-ours", "step-000000006", "step-000000007"}));

  fs::create_directories(run + "/step-000000008.tmp");
  fs::remove(state_path(run + "/step-000000007", 1, 2));
  const FoundCheckpoint found = find_checkpoint(run);
  EXPECT_EQ(found.path, run + "/step-000000006");
  ASSERT_EQ(found.ignored.size(), 2u);
  EXPECT_NE(found.ignored[0].find("step-000000008.tmp: it was not finished"), std::string::npos);
  EXPECT_NE(found.ignored[1].find("step-000000007: incomplete"), std::string::npos);
  EXPECT_EQ(find_checkpoint(run + "/step-000000006").path, run + "/step-000000006");
  EXPECT_FALSE(find_checkpoint(run + "/not-ours").path);
  expect_bad_input([&] { find_checkpoint(run + "/nowhere"); }, {"nowhere", "no such folder"});
  expect_bad_input([&] { read_head(run + "/step-000000007"); }, {"step-000000007", "not a complete"});
}

TEST(CheckpointHead, KeepsLinkCosts) {
  LinkCosts links;
  links.measured = true;
  links.neighbour = {1, 2}, links.all_pairs = {3, 4}, links.intra_node = {5, 6}, links.inter_node = {7, 8};
  links.peer_memory = {9, 10};
  EXPECT_EQ(links_of(links_json(links)), links);
  links.library_measured = true;
  links.library = {11, 12};
  EXPECT_EQ(links_of(links_json(links)), links);
  Json old = links_json(links);
  old.erase(5), old.erase(4);  // the format of the first version
  ASSERT_TRUE(links_of(old));
  EXPECT_EQ(links_of(old)->inter_node, links.inter_node);
  EXPECT_FALSE(links_of(old)->library_measured);
  for (const Json& wrong : {Json::array(), Json("fast"), Json{{1, 2}, {3, 4}, {5, 6}, {"7", 8}}}) {
    EXPECT_FALSE(links_of(wrong)) << wrong;
  }
}

TEST_P(CheckpointTest, RejectsARunThatDoesNotFit) {
  TrainConfig c = config(1, "fp32");
  train_and_save(c);
  auto refused = [&](const std::function<void(TrainConfig&)>& change, const std::vector<std::string>& parts) {
    TrainConfig other = c;
    other.resume = checkpoint(4);
    change(other);
    expect_bad_input([&] { train(other); }, parts);
  };
  refused([](TrainConfig& t) { t.model.mlp = 24; }, {"model", "\"mlp\":16", "\"mlp\":24", "--init"});
  refused([](TrainConfig& t) { t.model.gelu = Gelu::tanh; }, {"model", "\"gelu\":\"tanh\"", "--init"});
  refused([](TrainConfig& t) { t.optimizer = OptimizerKind::sgd; }, {"optimizer", "adamw", "sgd"});
  refused([](TrainConfig& t) { t.steps = 3; }, {"at step 4", "ends at 3", "--steps"});
  c.resume = checkpoint(4);
  EXPECT_TRUE(compare_with_head(c, read_head(checkpoint(4))).empty());
  c.lr = 0.5;
  const auto notes = compare_with_head(c, read_head(checkpoint(4)));
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find("lr 0.01, now 0.5"), std::string::npos) << notes[0];
}

// Bits are flipped anywhere, and the file is truncated anywhere.
TEST_P(CheckpointTest, RejectsEveryDamagedFile) {
  const TrainConfig c = config(1, "bf16");
  TrainConfig saved = c;
  saved.devices.resize(2, GetParam());
  train_and_save(saved);
  const std::string from = checkpoint(2);
  std::mt19937 random(7);
  int refused = 0;
  const int trials = testing::short_sweeps() ? 20 : 60;
  for (const std::string& path : {weights_path(from), state_path(from, 0, 2), state_path(from, 1, 2)}) {
    const Bytes good = read_bytes(path);
    for (int t = 0; t < trials; ++t) {
      Bytes bad = good;
      // Half of the damage is in the first bytes, which contain the structure.
      const size_t at = random() % (t % 2 == 0 ? good.size() : std::min<size_t>(good.size(), 200));
      if (t % 3 == 2) {
        bad.resize(at);
      } else {
        bad[at] ^= static_cast<uint8_t>(1u << random() % 8);
      }
      write_bytes(path, bad);
      try {
        restore(c, 1, Device::host(), from);
        ADD_FAILURE() << path << ": trial " << t << ", byte " << at << ", was not detected";
      } catch (const BadInput& error) {
        ++refused;
        EXPECT_NE(std::string(error.what()).find(from), std::string::npos) << error.what();
      }
    }
    write_bytes(path, good);
  }
  EXPECT_EQ(refused, 3 * trials);
  EXPECT_NO_THROW(restore(c, 1, Device::host(), from));
}

// 1,000 checkpoints with one bit flipped in any file. If a change is accepted, it has no effect: a checksum's
// digits may be upper-case.
TEST(Checkpoint, OneFlippedBitIsRejectedOrChangesNothing) {
  TrainConfig c;
  c.model = tiny_model();
  c.devices.assign(2, Device::host());
  c.compression = CompressionSpec::parse("int8");
  c.batch_size = 4, c.steps = 2, c.eval_batch_size = 8;
  const TemporaryFolder folder;
  c.checkpoint_directory = folder.path("run");
  c.checkpoint_every = 2;
  Recorder recorder;
  run_training(c, make_synthetic(c.model, 38, 10, 1), recorder);
  const std::string from = NewCheckpoint::final_path(folder.path("run"), 2);
  std::vector<std::string> paths;
  size_t bytes = 0;
  for (const auto& entry : fs::recursive_directory_iterator(from)) {
    if (!entry.is_regular_file()) continue;
    paths.push_back(entry.path());
    bytes += entry.file_size();
  }
  std::sort(paths.begin(), paths.end());
  const std::vector<Restored> sound = restore(c, 1, Device::host(), from);
  std::mt19937 random(17);
  const int kTrials = testing::short_sweeps() ? 100 : 1000;
  int refused = 0, unchanged = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    size_t at = random() % bytes, file = 0;
    for (; at >= fs::file_size(paths[file]); ++file) at -= fs::file_size(paths[file]);
    const Bytes good = read_bytes(paths[file]);
    Bytes bad = good;
    bad[at] ^= static_cast<uint8_t>(1u << random() % 8);
    write_bytes(paths[file], bad);
    try {
      EXPECT_TRUE(restore(c, 1, Device::host(), from) == sound)
          << paths[file] << ": a bit of byte " << at << " changed what was restored";
      ++unchanged;
    } catch (const BadInput& error) {
      ++refused;
    }
    write_bytes(paths[file], good);
  }
  EXPECT_EQ(refused + unchanged, kTrials);
  EXPECT_GE(refused, kTrials * 9 / 10);
  std::printf("%d checkpoints of %zu bytes with one flipped bit: %d refused, %d unchanged\n", kTrials, bytes,
              refused, unchanged);
}

}  // namespace
}  // namespace gradwire
