// Tests properties of the training loop for several ranks.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <numeric>
#include <thread>

#include "runtime/threads/thread_pool.h"
#include "runtime/util/error.h"
#include "tests/support/devices.h"
#include "tests/support/expect.h"
#include "tests/support/thinned.h"
#include "tests/support/threads.h"
#include "tests/trainer/runs.h"
#include "trainer/model/parameters.h"
#include "trainer/model/vit.h"
#include "trainer/train/deferred_update.h"
#include "trainer/train/optimizer_state.h"
#include "trainer/train/rank.h"
#include "trainer/train/run.h"
#include "trainer/train/run_reporter.h"
#include "trainer/train/weight_shards.h"

namespace gradwire::testing {
namespace {

// Expects two runs with equal losses, evaluations and weights.
void expect_same_run(const Recorder& got, const Recorder& want, const std::string& what) {
  EXPECT_EQ(got.losses, want.losses) << what;
  EXPECT_EQ(got.eval_losses, want.eval_losses) << what;
  EXPECT_EQ(got.hash, want.hash) << what;
}

class TrainTest : public ::testing::TestWithParam<Device> {
 protected:
  TrainConfig config(int ranks, const char* spec = "fp32") const {
    TrainConfig config = run_config(small_model(), ranks, GetParam(), spec);
    config.batch_size = 8;
    config.steps = short_sweeps() ? 6 : 12;
    config.warmup_steps = 3;
    config.lr = 3e-3;
    config.seed = 5;
    config.eval_batch_size = 7;
    config.timeout_s = 60;
    return config;
  }
  Recorder train(const TrainConfig& config) const { return testing::train(config, data_); }
  const DataSplits data_ = make_synthetic(small_model(), 192, 50, 1);
};
GW_INSTANTIATE_ON_DEVICES(TrainTest);

TEST_P(TrainTest, LearnsWithEveryCompression) {
  for (const char* spec : {"fp32", "bf16", "bf16:round=stochastic", "powersgd:rank=2"}) {
    TrainConfig c = config(4, spec);
    c.steps = 90;
    Recorder r = train(c);
    ASSERT_EQ(r.steps.size(), 90u);
    EXPECT_NEAR(r.steps.front().loss, std::log(4.0), 1e-5) << spec;  // a zero head is uniform
    EXPECT_LT(r.steps.back().loss, 0.5) << spec;
    ASSERT_FALSE(r.evals.empty());
    EXPECT_GT(r.evals.back().test_accuracy, 0.8) << spec;
    EXPECT_LT(r.evals.back().test_loss, 0.7) << spec;
  }
}

TEST_P(TrainTest, Bf16LearnsWhatFp32Learns) {
  TrainConfig c = config(2);
  c.steps = 90;
  const Recorder exact = train(c);
  c.precision = Precision::bf16;
  const Recorder r = train(c);
  EXPECT_NE(r.hash, exact.hash);
  EXPECT_EQ(r.hash, train(c).hash);
  EXPECT_LT(r.steps.back().loss, 0.5);
  EXPECT_NEAR(r.evals.back().test_loss, exact.evals.back().test_loss, 0.02);
  EXPECT_NEAR(r.evals.back().test_accuracy, exact.evals.back().test_accuracy, 0.041);  // two of 50 images
}

TEST_P(TrainTest, SameConfigSameBits) {
  for (const char* spec : {"fp32", "bf16:round=stochastic", "powersgd:rank=2"}) {
    const int before = host_threads();
    Recorder a = train(config(3, spec));
    set_host_threads(4);
    Recorder b = train(config(3, spec));
    set_host_threads(1);
    Recorder c = train(config(3, spec));
    set_host_threads(before);
    for (const Recorder* other : {&b, &c}) {
      expect_same_run(*other, a, spec);
      EXPECT_EQ(a.evals.back().test_accuracy, other->evals.back().test_accuracy) << spec;
    }
    TrainConfig other_seed = config(3, spec);
    other_seed.seed = 6;
    EXPECT_NE(a.hash, train(other_seed).hash) << spec;
  }
}

TEST_P(TrainTest, GraphsAndOverlappingForwardGiveTheSameBits) {
  struct Case {
    bool graph;  // true: --graph; false: --overlap-forward
    const char* spec;
    int ranks;
    int64_t accumulate;
    Precision precision = Precision::fp32;
    double bucket_mb = 0.003;
  };
  for (auto [graph, spec, ranks, accumulate, precision, bucket_mb] : thinned(
           {Case{true, "fp32", 1, 1}, Case{false, "fp32", 1, 1}, Case{true, "fp32", 2, 3},
            Case{false, "fp32", 2, 1, Precision::fp32, 0.00005},  // a bucket per tensor
            Case{true, "bf16", 3, 1}, Case{false, "fp32", 2, 1}, Case{true, "bf16:round=stochastic", 4, 1},
            Case{false, "bf16:round=stochastic", 3, 2, Precision::bf16, 0.001}, Case{true, "fp8", 2, 1},
            Case{false, "int8", 4, 1, Precision::fp32, 25}, Case{true, "powersgd:rank=2", 4, 1},
            Case{false, "powersgd:rank=2,start=4", 3, 1, Precision::bf16},
            Case{true, "powersgd:rank=2,wire=bf16,start=4", 3, 2},
            Case{true, "powersgd:rank=2,alternate=on", 2, 1}, Case{true, "randk:ratio=0.1", 2, 1}},
           11)) {
    if (graph && GetParam().is_cuda() && ranks > 1) continue;  // rejected, see below
    SCOPED_TRACE(fmt::format("{}, {} ranks, {}", spec, ranks, graph ? "graph" : "overlap"));
    TrainConfig c = config(ranks, spec);
    c.accumulate = accumulate;
    c.precision = precision;
    c.bucket_mb = bucket_mb;
    c.optimizer = !graph && ranks == 2 ? OptimizerKind::sgd : OptimizerKind::adamw;
    const Recorder plain = train(c);
    (graph ? c.graph : c.overlap_forward) = true;
    const Recorder other = train(c);
    expect_same_run(other, plain, spec);
    for (size_t s = 0; s < plain.steps.size(); ++s) {
      SCOPED_TRACE(fmt::format("step {}", s));
      const StepRecord& step = other.steps[s];
      EXPECT_EQ(plain.steps[s].wire_bytes, step.wire_bytes);
      EXPECT_EQ(plain.steps[s].lr, step.lr);
      EXPECT_GE(step.data_ms, 0.0);
      EXPECT_GE(step.exposed_comm_ms, 0.0);
      if (graph) {
        EXPECT_GE(step.step_ms, step.forward_ms);
      }
      EXPECT_GT(graph ? step.forward_ms : step.optimizer_ms, 0.0);
      EXPECT_GE(step.forward_ms, 0.0);
    }
  }
}

// Checks sharded runs, in which each rank holds and updates a part of the moments.
TEST_P(TrainTest, ShardedRunsMatchUnshardedOnesBitForBit) {
  for (const char* spec : {"fp32:schedule=two_shot", "fp32:schedule=ring",
                           "powersgd:rank=2,schedule=two_shot", "powersgd:rank=2"}) {
    const bool two_shot = std::string(spec).find("two_shot") != std::string::npos;
    for (int ranks : thinned({1, 2, 3, 5, 8})) {
      TrainConfig c = config(ranks, spec);
      if (ranks > 4) c.batch_size = 2;
      c.bucket_mb = ranks == 5 ? 25 : ranks == 8 ? 0.0001 : 0.003;  // 0.0001: a bucket per tensor
      c.optimizer = ranks == 2 ? OptimizerKind::sgd : OptimizerKind::adamw;
      c.precision = ranks == 3 && two_shot ? Precision::bf16 : Precision::fp32;
      const Recorder whole = train(c);
      c.shard_optimizer = true;
      c.graph = ranks == 3 && GetParam().is_host();
      expect_same_run(train(c), whole, fmt::format("{}, {}", spec, ranks));
    }
  }
}

// Checks that compressed weights are equal on all ranks. The run ends with an error if the ranks' weights
// differ in a bit.
TEST_P(TrainTest, CompressedWeightsAreEqualOnAllRanksAndTrain) {
  const Recorder exact = train(config(4));
  for (const char* format : thinned({"bf16", "fp8", "int8", "int4:rotate=hadamard"}, 2)) {
    for (const char* spec : {"fp32", "int8"}) {
      TrainConfig c = config(4, spec);
      c.bucket_mb = 0.003;
      c.shard_optimizer = true;
      const uint64_t plain = train(c).steps.back().wire_bytes;
      c.gather_weights = CompressionSpec::parse(format).wire;
      const Recorder r = train(c);
      EXPECT_NE(r.hash, exact.hash) << format;
      EXPECT_EQ(r.hash, train(c).hash) << format;
      EXPECT_LT(r.steps.back().wire_bytes, plain) << format;
      EXPECT_NEAR(r.evals.back().test_loss, exact.evals.back().test_loss,
                  std::string(format) == "bf16" ? 0.02 : 0.3)
          << format << " with " << spec;
    }
  }
}

TEST_P(TrainTest, ShardedOptimizersNeedAnNthOfTheMemory) {
  for (int ranks : {1, 2, 4, 8}) {
    TrainConfig c = config(ranks);
    const RunMemory whole = plan_memory(c);
    c.shard_optimizer = true;
    const RunMemory divided = plan_memory(c);
    EXPECT_NEAR(static_cast<double>(divided.optimizer), static_cast<double>(whole.optimizer) / ranks,
                64.0 * ranks)
        << ranks;
    EXPECT_EQ(divided.gradients, whole.gradients);
    EXPECT_EQ(divided.model, whole.model);
    c.memory_limit = divided.total();
    EXPECT_NO_THROW(check_memory_limit(c));
    c.memory_limit = divided.total() - 1;
    EXPECT_THROW(check_memory_limit(c), BadInput);
  }
}

TEST_P(TrainTest, ARunTakesTheMemoryOfItsPlan) {
  for (bool sharded : {false, true}) {
    for (int ranks : {1, 2, 4}) {
      TrainConfig c = config(ranks, "int8");
      c.model.width = 64, c.model.mlp = 256, c.model.depth = 8;
      c.bucket_mb = 0.1;
      c.batch_size = 2;
      c.eval_every = 0;
      c.shard_optimizer = sharded;
      const auto planned = static_cast<double>(plan_memory(c).total());
      const auto taken = static_cast<double>(train(c).memory_bytes);
      EXPECT_NEAR(taken, planned, 0.1 * planned) << sharded << ", " << ranks;
    }
  }
}

TEST_P(TrainTest, RejectsGraphsOfGpuRanksInOneProcess) {
  TrainConfig c = config(2);
  c.graph = true;
  Recorder recorder;
  if (GetParam().is_host()) {
    EXPECT_NO_THROW(run_training(c, data_, {{&recorder}}));
  } else {
    EXPECT_THROW(run_training(c, data_, {{&recorder}}), BadInput);
  }
}

// Checks that any split over ranks and micro-batches gives the same global batches. Only the order of
// additions may differ.
TEST_P(TrainTest, RanksAndAccumulationSplitTheSameGlobalBatch) {
  auto run = [&](int ranks, int64_t batch, int64_t accumulate) {
    TrainConfig c = config(ranks);
    c.optimizer = OptimizerKind::sgd;  // AdamW would turn rounding errors of tiny gradients into whole steps
    c.lr = 0.05;
    c.batch_size = batch;
    c.accumulate = accumulate;
    return train(c);
  };
  Recorder one = run(1, 24, 1);
  for (auto [ranks, batch, accumulate] :
       {std::array<int64_t, 3>{3, 8, 1}, {1, 8, 3}, {2, 4, 3}, {2, 12, 1}}) {
    Recorder other = run(static_cast<int>(ranks), batch, accumulate);
    ASSERT_EQ(one.steps.size(), other.steps.size());
    for (size_t s = 0; s < one.steps.size(); ++s) {
      EXPECT_NEAR(one.steps[s].loss, other.steps[s].loss, 2e-5) << ranks << " ranks, step " << s;
    }
    EXPECT_NEAR(one.evals.back().test_loss, other.evals.back().test_loss, 2e-5);
  }
}

TEST_P(TrainTest, RecordsMatchTheRun) {
  TrainConfig c = config(2, "bf16");
  c.measure_peak = true;
  c.steps = 27;  // an epoch has 192 / 16 = 12 steps
  Recorder r = train(c);
  EXPECT_EQ(r.runs, 1);
  EXPECT_EQ(r.ends, 1);
  EXPECT_EQ(r.info.parameters, count_elements(vit_parameters(c.model)));
  EXPECT_GE(r.info.buckets, 1);
  EXPECT_NE(r.info.schedule, "none");
  EXPECT_NE(r.info.schedule, "auto");
  EXPECT_GT(r.info.peak_tflops, 0);
  EXPECT_GT(r.info.copy_gb_per_s, 0);
  if (GetParam().is_host()) {
    EXPECT_EQ(r.info.products.rfind("OpenBLAS ", 0), 0u) << r.info.products;
  } else {
    EXPECT_EQ(r.info.products, "");
  }
  ASSERT_EQ(r.steps.size(), 27u);
  for (size_t s = 0; s < r.steps.size(); ++s) {
    const StepRecord& step = r.steps[s];
    EXPECT_EQ(step.step, static_cast<int64_t>(s));
    EXPECT_EQ(step.epoch, static_cast<int64_t>(s / 12));
    EXPECT_EQ(step.lr, learning_rate(c, static_cast<int64_t>(s)));
    EXPECT_TRUE(std::isfinite(step.loss));
    EXPECT_EQ(step.dense_bytes, 2 * step.wire_bytes) << "step " << s;
    EXPECT_GT(step.wire_bytes, 0u);
    for (double ms : {step.data_ms, step.forward_ms, step.backward_ms, step.optimizer_ms, step.comm_ms,
                      step.exposed_comm_ms}) {
      EXPECT_GE(ms, 0) << "step " << s;
    }
    EXPECT_GT(step.comm_ms, 0);
    EXPECT_GE(step.step_ms, step.data_ms + step.forward_ms + step.backward_ms + step.optimizer_ms - 1e-6);
    EXPECT_NEAR(step.images_per_s * step.step_ms, 1e3 * 16, 1e-6);
    // All ranks are on one device.
    EXPECT_NEAR(step.tflops * step.step_ms * 1e9, training_flops_per_image(c.model) * 16, 1);
  }
  // Evaluations follow each epoch and the last step. They use all images, and follow the reports of all
  // earlier steps.
  ASSERT_EQ(r.evals.size(), 3u);
  EXPECT_EQ(r.steps_before_eval, (std::vector<size_t>{12, 24, 27}));
  for (const EvalRecord& e : r.evals) EXPECT_EQ(e.images, 50);
  EXPECT_EQ(r.evals.back().step, 27);
  EXPECT_DOUBLE_EQ(r.evals.back().epoch, 27.0 / 12.0);
}

TEST_P(TrainTest, EvaluationDoesNotDependOnTheBatchSize) {
  std::vector<EvalRecord> evals;
  for (int64_t batch : {1, 7, 50, 64}) {
    TrainConfig c = config(3);
    c.eval_batch_size = batch;
    evals.push_back(train(c).evals.back());
  }
  for (const EvalRecord& e : evals) {
    EXPECT_EQ(e.images, 50);
    EXPECT_EQ(e.test_accuracy, evals[0].test_accuracy);
    EXPECT_NEAR(e.test_loss, evals[0].test_loss, 1e-6);
  }
}

TEST_P(TrainTest, EvalEverySelectsTheEpochs) {
  TrainConfig c = config(1);
  c.batch_size = 64;  // 3 steps per epoch
  c.steps = 14;
  c.eval_every = 2;
  EXPECT_EQ(train(c).steps_before_eval, (std::vector<size_t>{6, 12, 14}));
  c.eval_every = 0;
  Recorder never = train(c);
  EXPECT_TRUE(never.evals.empty());
  EXPECT_EQ(never.steps.size(), 14u);
  EXPECT_EQ(never.ends, 1);
}

TEST_P(TrainTest, RunsUseThePlannedMemory) {
  for (const char* spec : {"fp32", "bf16", "powersgd:rank=2", "powersgd:rank=2,wire=bf16"}) {
    TrainConfig c = config(3, spec);
    c.steps = 1;
    EXPECT_EQ(plan_memory(c).compression.total(), train(c).info.reducer_extra_bytes) << spec;
  }
  const std::string text = memory_text(config(3, "bf16"), plan_memory(config(3, "bf16")));
  expect_has(text, {"Extra memory for bf16: "});
}

TEST_P(TrainTest, WorldOfOneSendsNothing) {
  Recorder r = train(config(1, "powersgd:rank=2"));
  EXPECT_EQ(r.info.buckets, 0);
  EXPECT_EQ(r.info.schedule, "none");
  for (const StepRecord& step : r.steps) {
    EXPECT_EQ(step.wire_bytes, 0u);
    EXPECT_EQ(step.comm_ms, 0);
  }
  EXPECT_EQ(r.hash, train(config(1, "fp32")).hash);  // a single rank does not compress
}

TEST_P(TrainTest, AnObserverThatThrowsEndsTheRunOnAllRanks) {
  struct Thrower : RunObserver {
    void on_step(const StepRecord& s) override {
      if (s.step == 4) throw BadInput("enough");
    }
  } thrower;
  EXPECT_EQ(expect_error<BadInput>([&] { run_training(config(4, "bf16"), data_, {{&thrower}}); }, {}),
            "enough");
}

TEST_P(TrainTest, FailuresInSetUpEndTheOtherRanks) {
  TrainConfig c = config(3);
  c.batch_size = 65;  // the shard of a rank has 64 images
  Recorder recorder;
  EXPECT_THROW(run_training(c, data_, {{&recorder}}), BadInput);
  EXPECT_EQ(recorder.runs, 0);
}

TEST_P(TrainTest, NamesAMissingRankInsteadOfHanging) {
  TrainConfig c = config(2);
  const std::chrono::milliseconds timeout(300);
  auto comms = Communicator::create_local(c.devices, timeout);
  LocalRankReports reports(2, timeout);
  InitialWeights initial(c.seed);
  Recorder recorder;
  const RunObservers observers{{&recorder}};
  const SharedRun shared{data_, observers, reports, initial};
  expect_error<CommError>([&] { RankTrainer(c, shared, *comms[0]).run(); }, {"rank 1"});
}

TEST_P(TrainTest, ARankThatStopsHalfwayEndsTheOthersWithTheReason) {
  TrainConfig c = config(3, "bf16");
  TrainConfig shorter = c;  // rank 2 stops after 4 of 12 steps
  shorter.steps = 4;
  shorter.eval_every = c.eval_every = 0;
  auto comms = Communicator::create_local(c.devices, std::chrono::seconds(60));
  LocalRankReports reports(3, std::chrono::seconds(60));
  InitialWeights initial(c.seed);
  Recorder recorder;
  const RunObservers observers{{&recorder}};
  // The failure ends all ranks far sooner than the timeout.
  const auto reasons = errors_in_threads(3, [&](int rank) {
    const SharedRun shared{data_, observers, reports, initial};
    RankTrainer(rank == 2 ? shorter : c, shared, *comms[rank]).run();
    if (rank != 2) return;
    for (auto& comm : comms) comm->abort("rank 2 went home");
    reports.abort("rank 2 went home");
  });
  for (int rank : {0, 1}) expect_has(reasons[rank], {"rank 2 went home"});
}

TEST_P(TrainTest, RejectsInvalidConfigurations) {
  Recorder recorder;
  for (auto spoil : std::vector<std::function<void(TrainConfig&)>>{
           [](TrainConfig& c) { c.steps = 0; }, [](TrainConfig& c) { c.batch_size = 0; },
           [](TrainConfig& c) { c.accumulate = 0; }, [](TrainConfig& c) { c.devices.clear(); },
           [](TrainConfig& c) { c.eval_batch_size = 0; }, [](TrainConfig& c) { c.model.image = 16; },
           [](TrainConfig& c) { c.model.classes = 3; }, [](TrainConfig& c) { c.model.heads = 3; }}) {
    TrainConfig c = config(2);
    spoil(c);
    EXPECT_THROW(run_training(c, data_, {{&recorder}}), BadInput);
  }
}

}  // namespace
}  // namespace gradwire::testing
