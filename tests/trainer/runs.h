// Small models, and an observer that records a run, for tests of training.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "trainer/data/dataset.h"
#include "trainer/model/parameters.h"
#include "trainer/train/run.h"

namespace gradwire::testing {

inline VitConfig tiny_model() {
  return {.name = "tiny",
          .image = 4,
          .channels = 1,
          .patch = 2,
          .width = 8,
          .depth = 1,
          .heads = 2,
          .mlp = 16,
          .classes = 4};
}
inline VitConfig small_model(int32_t depth = 2) {
  return {.name = "small",
          .image = 8,
          .channels = 1,
          .patch = 4,
          .width = 16,
          .depth = depth,
          .heads = 2,
          .mlp = 32,
          .classes = 4};
}

// Returns the settings that most tests share, of a run with `ranks` ranks on the device.
inline TrainConfig run_config(const VitConfig& model, int ranks, Device device, const std::string& spec) {
  TrainConfig config;
  config.model = model;
  config.devices.assign(static_cast<size_t>(ranks), device);
  config.compression = CompressionSpec::parse(spec);
  config.eval_batch_size = 8;
  return config;
}

inline int index_of(const std::vector<VitParameter>& parameters, const std::string& name) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].name == name) return static_cast<int>(i);
  }
  ADD_FAILURE() << "no parameter " << name;
  return 0;
}

struct Recorder : RunObserver {
  void on_run(const RunInfo& i) override { info = i, ++runs; }
  void on_step(const StepRecord& s) override {
    steps.push_back(s);
    losses.push_back(s.loss);
    epochs.push_back(s.epoch);
  }
  void on_eval(const EvalRecord& e) override {
    evals.push_back(e);
    eval_losses.push_back(e.test_loss);
    steps_before_eval.push_back(steps.size());
  }
  void on_checkpoint(const CheckpointRecord& c) override { saved.push_back(c.step); }
  void on_end(const EndRecord& e) override { hash = e.parameter_hash, memory_bytes = e.memory_bytes, ++ends; }

  RunInfo info;
  int runs = 0, ends = 0;
  std::vector<StepRecord> steps;
  std::vector<double> losses, eval_losses;
  std::vector<int64_t> epochs, saved;
  std::vector<EvalRecord> evals;
  std::vector<size_t> steps_before_eval;
  uint64_t hash = 0;
  int64_t memory_bytes = 0;
};

inline Recorder train(const TrainConfig& config, const DataSplits& data) {
  Recorder recorder;
  run_training(config, data, {{&recorder}});
  return recorder;
}

}  // namespace gradwire::testing
