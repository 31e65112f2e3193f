// Runs that save checkpoints, and ranks that restore them.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <future>
#include <string>
#include <utility>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "tests/collectives/reducer_rank.h"
#include "tests/support/temporary_folder.h"
#include "tests/trainer/runs.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/checkpoint/head.h"
#include "trainer/train/optimizer_state.h"
#include "trainer/train/weight_shards.h"

namespace gradwire::testing {

class CheckpointFixture : public ::testing::TestWithParam<Device> {
 protected:
  TrainConfig config(int ranks, const char* spec) const {
    TrainConfig config = run_config(tiny_model(), ranks, GetParam(), spec);
    config.batch_size = 4;
    config.steps = 7;
    config.warmup_steps = 2;
    config.lr = 1e-2;
    config.weight_decay = 0.01;
    config.seed = 3;
    return config;
  }
  Recorder train(const TrainConfig& config) const { return testing::train(config, data_); }
  Recorder train_from(TrainConfig config, const std::string& checkpoint) const {
    config.resume = checkpoint;
    return train(config);
  }
  // Trains, and saves a checkpoint after every step into an empty folder. Keeps all checkpoints.
  Recorder train_and_save(TrainConfig config) const {
    std::filesystem::remove_all(folder_.path("run"));
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

inline std::vector<float> weights_in(const std::string& path) {
  const auto parameters = vit_parameters(tiny_model());
  const ParameterLayout layout = packed_layout(parameters);
  std::vector<float> values(layout.elements);
  load_weights(path, parameters, layout, true, values);
  return values;
}

// The state that a rank of a training run saves and restores, except moments.
struct CheckpointedRank {
  CheckpointedRank(Communicator& c, const TrainConfig& config, ReducerOptions options)
      : comm(c),
        stream(Stream::create(comm.device(), "train")),
        reducer(comm, config.compression, gradient_tensors(config.model), std::move(options)),
        parameters(vit_parameters(config.model)),
        layout(reducer_layout(reducer)),
        weights(make_buffer<float>(comm.device(), layout.elements)) {
    fill_zero(stream, weights.data(), weights.bytes());
  }
  RankState state() {
    return {.comm = comm,
            .stream = stream,
            .reducer = reducer,
            .parameters = parameters,
            .layout = layout,
            .weights = {weights.as<float>()},
            .moments = {},
            .parts = {{0, layout.elements}}};
  }
  // Makes a step with gradients that are different on each rank.
  void step(int number) {
    for (int i = 0; i < reducer.tensors(); ++i) {
      const auto seed = static_cast<uint32_t>(1000 * number + 100 * comm.rank() + i);
      const auto gradient = normal(parameters[i].elements(), seed);
      to_device(stream, reducer.gradient(i), std::span<const float>(gradient));
      reducer.ready(i, stream);
    }
    reducer.wait(stream);
    stream.synchronize();
  }
  // Returns the residuals in the model's layout.
  std::vector<float> residual() {
    std::vector<float> all(layout.elements);
    for (const TensorState& s : reducer.tensor_state()) {
      if (s.kind != kResidualKind) continue;
      const auto values = values_of(stream, s);
      std::copy(values.begin(), values.end(), all.begin() + layout.offsets[s.tensor]);
    }
    return all;
  }

  Communicator& comm;
  Stream stream;
  Reducer reducer;
  std::vector<VitParameter> parameters;
  ParameterLayout layout;
  Buffer weights;
};

// The initial state of a rank of a resumed run: residuals in the model's layout, values left in its
// gradients, weights and moments.
struct Restored {
  std::vector<float> residual, left;
  std::vector<std::vector<float>> trained;
  bool operator==(const Restored&) const = default;
};

inline Restored restore_rank(const TrainConfig& config, Communicator& comm, const std::string& from) {
  CheckpointedRank rank(comm, config, {.seed = config.seed});
  const int64_t elements = rank.layout.elements;
  const Optimizer optimizer(config, rank.stream, {{0, elements}});
  RankState state = rank.state();
  state.moments = optimizer.moments();
  const bool left = restore_checkpoint(state, config, read_head(from));
  Restored out{.residual = rank.residual(),
               .left = to_host<float>(rank.stream, rank.reducer.gradients().as<float>(), elements),
               .trained = {to_host<float>(rank.stream, rank.weights.as<float>(), elements)}};
  for (const auto& moment : optimizer.moments())
    out.trained.push_back(to_host<float>(rank.stream, moment.values.data, elements));
  EXPECT_EQ(left, std::any_of(out.left.begin(), out.left.end(), [](float x) { return x != 0; }));
  return out;
}

inline std::vector<Restored> restore(TrainConfig config, int world, Device device, const std::string& from) {
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

}  // namespace gradwire::testing
