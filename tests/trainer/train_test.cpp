// Properties of the training loop, over ranks.
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
#include "trainer/config/run.h"
#include "trainer/data/dataset.h"
#include "trainer/model/flops.h"
#include "trainer/train/deferred_update.h"
#include "trainer/train/memory.h"
#include "trainer/train/parameter_hash.h"
#include "trainer/train/rank.h"
#include "trainer/train/rank_reports.h"
#include "trainer/train/schedule.h"

namespace gradwire {
namespace {

using testing::expect_error;
using testing::thinned;

struct Recorder : RunObserver {
  void on_run(const RunInfo& i) override { info = i, ++runs; }
  void on_step(const StepRecord& s) override { steps.push_back(s); }
  void on_eval(const EvalRecord& e) override {
    evals.push_back(e);
    steps_before_eval.push_back(steps.size());
  }
  void on_end(const EndRecord& e) override { hash = e.parameter_hash, memory_bytes = e.memory_bytes, ++ends; }

  RunInfo info;
  int runs = 0, ends = 0;
  std::vector<StepRecord> steps;
  std::vector<EvalRecord> evals;
  std::vector<size_t> steps_before_eval;
  uint64_t hash = 0;
  int64_t memory_bytes = 0;
};

VitConfig small_model() {
  VitConfig model;
  model.name = "small";
  model.image = 8;
  model.channels = 1;
  model.patch = 4;
  model.width = 16;
  model.depth = 2;
  model.heads = 2;
  model.mlp = 32;
  model.classes = 4;
  return model;
}

class TrainTest : public ::testing::TestWithParam<Device> {
 protected:
  TrainConfig config(int ranks, const char* spec = "fp32") const {
    TrainConfig config;
    config.model = small_model();
    config.devices.assign(static_cast<size_t>(ranks), GetParam());
    config.compression = CompressionSpec::parse(spec);
    config.batch_size = 8;
    config.steps = testing::short_sweeps() ? 6 : 12;
    config.warmup_steps = 3;
    config.lr = 3e-3;
    config.seed = 5;
    config.eval_batch_size = 7;
    config.timeout_s = 60;
    return config;
  }
  Recorder train(const TrainConfig& config) const {
    Recorder recorder;
    run_training(config, data_, recorder);
    return recorder;
  }
  static std::vector<double> losses(const Recorder& recorder) {
    std::vector<double> values;
    for (const StepRecord& s : recorder.steps) values.push_back(s.loss);
    return values;
  }

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
      EXPECT_EQ(a.hash, other->hash) << spec;
      EXPECT_EQ(losses(a), losses(*other)) << spec;
      EXPECT_EQ(a.evals.back().test_loss, other->evals.back().test_loss) << spec;
      EXPECT_EQ(a.evals.back().test_accuracy, other->evals.back().test_accuracy) << spec;
    }
    TrainConfig other_seed = config(3, spec);
    other_seed.seed = 6;
    EXPECT_NE(a.hash, train(other_seed).hash) << spec;
  }
}

TEST_P(TrainTest, GraphsGiveTheSameBits) {
  struct Case {
    const char* spec;
    int ranks;
    int64_t accumulate;
  };
  for (auto [spec, ranks, accumulate] : thinned(
           {Case{"fp32", 1, 1}, Case{"fp32", 2, 3}, Case{"bf16", 3, 1}, Case{"bf16:round=stochastic", 4, 1},
            Case{"fp8", 2, 1}, Case{"powersgd:rank=2", 4, 1}, Case{"powersgd:rank=2,wire=bf16,start=4", 3, 2},
            Case{"powersgd:rank=2,alternate=on", 2, 1}, Case{"randk:ratio=0.1", 2, 1}},
           5)) {
    if (GetParam().is_cuda() && ranks > 1) continue;  // refused, see below
    TrainConfig c = config(ranks, spec);
    c.accumulate = accumulate;
    const Recorder plain = train(c);
    c.graph = true;
    const Recorder graph = train(c);
    EXPECT_EQ(losses(plain), losses(graph)) << spec;
    EXPECT_EQ(plain.hash, graph.hash) << spec;
    ASSERT_EQ(plain.evals.size(), graph.evals.size());
    EXPECT_EQ(plain.evals.back().test_loss, graph.evals.back().test_loss) << spec;
    for (size_t s = 0; s < plain.steps.size(); ++s) {
      EXPECT_EQ(plain.steps[s].wire_bytes, graph.steps[s].wire_bytes) << spec << ", step " << s;
      EXPECT_EQ(plain.steps[s].lr, graph.steps[s].lr);
      EXPECT_GT(graph.steps[s].forward_ms, 0.0) << "step " << s;
      EXPECT_GE(graph.steps[s].data_ms, 0.0) << "step " << s;
      EXPECT_GE(graph.steps[s].step_ms, graph.steps[s].forward_ms) << "step " << s;
    }
  }
}

TEST_P(TrainTest, OverlappingForwardGivesTheSameBits) {
  struct Case {
    const char* spec;
    int ranks;
    int64_t accumulate;
    Precision precision;
    double bucket_mb;
  };
  for (auto [spec, ranks, accumulate, precision, bucket_mb] :
       {Case{"fp32", 1, 1, Precision::fp32, 0.003}, Case{"fp32", 2, 1, Precision::fp32, 0.003},
        Case{"fp32", 2, 1, Precision::fp32, 0.00005},  // a bucket per tensor
        Case{"bf16:round=stochastic", 3, 2, Precision::bf16, 0.001}, Case{"int8", 4, 1, Precision::fp32, 25},
        Case{"powersgd:rank=2,start=4", 3, 1, Precision::bf16, 0.003}}) {
    TrainConfig c = config(ranks, spec);
    c.accumulate = accumulate;
    c.precision = precision;
    c.bucket_mb = bucket_mb;
    c.optimizer = ranks == 2 ? OptimizerKind::sgd : OptimizerKind::adamw;
    const Recorder plain = train(c);
    c.overlap_forward = true;
    const Recorder overlapped = train(c);
    EXPECT_EQ(losses(plain), losses(overlapped)) << spec;
    EXPECT_EQ(plain.hash, overlapped.hash) << spec;
    ASSERT_EQ(plain.evals.size(), overlapped.evals.size());
    for (size_t i = 0; i < plain.evals.size(); ++i) {
      EXPECT_EQ(plain.evals[i].test_loss, overlapped.evals[i].test_loss) << spec;
    }
    for (size_t s = 0; s < plain.steps.size(); ++s) {
      const StepRecord& step = overlapped.steps[s];
      EXPECT_EQ(plain.steps[s].wire_bytes, step.wire_bytes) << spec << ", step " << s;
      EXPECT_EQ(plain.steps[s].lr, step.lr);
      EXPECT_GE(step.forward_ms, 0.0) << spec << ", step " << s;
      EXPECT_GT(step.optimizer_ms, 0.0) << spec << ", step " << s;
      EXPECT_GE(step.exposed_comm_ms, 0.0) << spec << ", step " << s;
    }
  }
}

// With five buckets: the buckets that fit in backward's time as they fill, then the others from the last.
TEST(ExchangeOrder, SendsTheFullBucketThatForwardNeedsFirst) {
  std::vector<BucketRange> buckets;
  for (int b = 0; b < 5; ++b) buckets.push_back({b, b + 1, 100 * b, 100 * (b + 1)});
  using Order = std::vector<int>;
  EXPECT_EQ(exchange_order(buckets, 0.0), (Order{4, 3, 2, 1, 0}));  // all are full at once
  EXPECT_EQ(exchange_order(buckets, 0.1), (Order{0, 4, 3, 2, 1}));  // the others once the first has been sent
  EXPECT_EQ(exchange_order(buckets, 0.3), (Order{0, 3, 4, 2, 1}));
  EXPECT_EQ(exchange_order(buckets, 0.6), (Order{0, 1, 3, 4, 2}));
  EXPECT_EQ(exchange_order(buckets, 1.0), (Order{0, 1, 2, 3, 4}));
  EXPECT_EQ(exchange_order(buckets, 7), (Order{0, 1, 2, 3, 4}));
  EXPECT_EQ(exchange_order({}, 0.5), Order{});
}

// Every rank holds a part of the moments and updates its part of the weights.
TEST_P(TrainTest, ShardedRunsMatchUnshardedOnesBitForBit) {
  for (const char* spec : {"fp32:schedule=two_shot", "powersgd:rank=2,schedule=two_shot"}) {
    for (int ranks : thinned({1, 2, 3, 5, 8})) {
      TrainConfig c = config(ranks, spec);
      if (ranks > 4) c.batch_size = 2;
      c.bucket_mb = ranks == 5 ? 25 : ranks == 8 ? 0.0001 : 0.003;  // 0.0001: a bucket per block
      c.optimizer = ranks == 2 ? OptimizerKind::sgd : OptimizerKind::adamw;
      c.precision = ranks == 3 ? Precision::bf16 : Precision::fp32;
      const Recorder whole = train(c);
      for (Sharding shard : {Sharding::gradients, Sharding::full}) {
        c.shard = shard;
        const Recorder divided = train(c);
        EXPECT_EQ(losses(whole), losses(divided)) << spec << ", " << ranks << ", " << name(shard);
        EXPECT_EQ(whole.hash, divided.hash) << spec << ", " << ranks << ", " << name(shard);
        ASSERT_EQ(whole.evals.size(), divided.evals.size());
        for (size_t i = 0; i < whole.evals.size(); ++i)
          EXPECT_EQ(whole.evals[i].test_loss, divided.evals[i].test_loss);
      }
    }
  }
}

TEST_P(TrainTest, ShardedOptimizersMatchUnshardedOnesBitForBit) {
  for (const char* spec : {"fp32:schedule=two_shot", "fp32:schedule=ring", "powersgd:rank=2"}) {
    for (int ranks : thinned({1, 2, 3, 4, 8})) {
      TrainConfig c = config(ranks, spec);
      if (ranks == 8) c.batch_size = 2;
      c.bucket_mb = 0.003;  // many buckets
      if (ranks % 2 == 0) c.optimizer = OptimizerKind::sgd;
      const Recorder whole = train(c);
      c.shard = Sharding::optimizer;
      const Recorder divided = train(c);
      EXPECT_EQ(losses(whole), losses(divided)) << spec << ", " << ranks;
      EXPECT_EQ(whole.hash, divided.hash) << spec << ", " << ranks;
      if (ranks == 3) {
        c.accumulate = 1;
        c.graph = GetParam().is_host();
        EXPECT_EQ(whole.hash, train(c).hash) << spec;
      }
    }
  }
}

// The run ends with an error if the ranks' weights differ in a bit.
TEST_P(TrainTest, CompressedWeightsAreEqualOnAllRanksAndTrain) {
  const Recorder exact = train(config(4));
  Sharding shard = Sharding::full;
  for (const char* format : thinned({"bf16", "fp8", "int8", "int4:rotate=hadamard"}, 2)) {
    for (const char* spec : {"fp32", "int8"}) {
      TrainConfig c = config(4, spec);
      c.bucket_mb = 0.003;
      c.shard = shard = shard == Sharding::full ? Sharding::optimizer : Sharding::full;
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
    c.shard = Sharding::optimizer;
    const RunMemory divided = plan_memory(c);
    EXPECT_NEAR(static_cast<double>(divided.optimizer), static_cast<double>(whole.optimizer) / ranks,
                64.0 * ranks)
        << ranks;
    EXPECT_EQ(divided.gradients, whole.gradients);
    c.bucket_mb = 0.003;
    c.model.depth = 8;
    c.shard = Sharding::none;
    const RunMemory deep = plan_memory(c);
    c.shard = Sharding::gradients;
    const RunMemory less = plan_memory(c);
    c.shard = Sharding::full;
    const RunMemory least = plan_memory(c);
    if (ranks > 1) {
      EXPECT_LT(less.gradients, deep.gradients);
      EXPECT_LT(least.model, deep.model);
    } else {
      EXPECT_EQ(least.total(), deep.total());
    }
    c.bucket_mb = config(ranks).bucket_mb;
    c.model = config(ranks).model;
    c.shard = Sharding::optimizer;
    c.memory_limit = divided.total();
    EXPECT_NO_THROW(check_memory_limit(c));
    c.memory_limit = divided.total() - 1;
    EXPECT_THROW(check_memory_limit(c), BadInput);
  }
}

TEST_P(TrainTest, ARunTakesTheMemoryOfItsPlan) {
  for (Sharding shard : {Sharding::none, Sharding::optimizer, Sharding::gradients, Sharding::full}) {
    for (int ranks : {1, 2, 4}) {
      TrainConfig c = config(ranks, "int8");
      c.model.width = 64, c.model.mlp = 256, c.model.depth = 8;
      c.bucket_mb = 0.1;
      c.batch_size = 2;
      c.eval_every = 0;
      c.shard = shard;
      const auto planned = static_cast<double>(plan_memory(c).total());
      const auto taken = static_cast<double>(train(c).memory_bytes);
      EXPECT_NEAR(taken, planned, 0.1 * planned) << name(shard) << ", " << ranks;
    }
  }
}

TEST_P(TrainTest, RejectsGraphsOfGpuRanksInOneProcess) {
  TrainConfig c = config(2);
  c.graph = true;
  Recorder recorder;
  if (GetParam().is_host()) {
    EXPECT_NO_THROW(run_training(c, data_, recorder));
  } else {
    EXPECT_THROW(run_training(c, data_, recorder), BadInput);
  }
}

// The same global batches for any split over ranks and micro-batches: only the order of additions may differ.
TEST_P(TrainTest, RanksAndAccumulationSplitTheSameGlobalBatch) {
  auto run = [&](int ranks, int64_t batch, int64_t accumulate) {
    TrainConfig c = config(ranks);
    c.optimizer = OptimizerKind::sgd;  // AdamW divides: rounding errors of tiny gradients become whole steps
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
  EXPECT_EQ(r.info.parameters, parameter_count(c.model));
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
  // After each epoch and at the end, on all images, and after all earlier steps have been reported.
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
  EXPECT_NE(text.find("Extra memory for bf16: "), std::string::npos) << text;
}

TEST_P(TrainTest, WorldOfOneSendsNothing) {
  Recorder r = train(config(1, "powersgd:rank=2"));
  EXPECT_EQ(r.info.buckets, 0);
  EXPECT_EQ(r.info.schedule, "none");
  for (const StepRecord& step : r.steps) {
    EXPECT_EQ(step.wire_bytes, 0u);
    EXPECT_EQ(step.comm_ms, 0);
  }
  EXPECT_EQ(r.hash, train(config(1, "fp32")).hash);  // compression is also unused
}

TEST_P(TrainTest, AnObserverThatThrowsEndsTheRunOnAllRanks) {
  struct Thrower : RunObserver {
    void on_step(const StepRecord& s) override {
      if (s.step == 4) throw BadInput("enough");
    }
  } thrower;
  try {
    run_training(config(4, "bf16"), data_, thrower);
    FAIL() << "nothing was thrown";
  } catch (const BadInput& error) {
    EXPECT_STREQ(error.what(), "enough");
  }
}

TEST_P(TrainTest, FailuresInSetUpEndTheOtherRanks) {
  TrainConfig c = config(3);
  c.batch_size = 65;  // the shard of a rank has 64 images
  Recorder recorder;
  EXPECT_THROW(run_training(c, data_, recorder), BadInput);
  EXPECT_EQ(recorder.runs, 0);
}

TEST_P(TrainTest, NamesAMissingRankInsteadOfHanging) {
  TrainConfig c = config(2);
  const std::chrono::milliseconds timeout(300);
  auto comms = Communicator::create_local(c.devices, timeout);
  LocalRankReports reports(2, timeout);
  InitialWeights initial(c.seed);
  Recorder recorder;
  const SharedRun shared{c, data_, recorder, reports, initial};
  expect_error<CommError>([&] { RankTrainer(shared, *comms[0]).run(); }, {"rank 1"});
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
  std::array<std::string, 2> reasons;
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      const SharedRun shared{rank == 2 ? shorter : c, data_, recorder, reports, initial};
      auto trainer = std::make_unique<RankTrainer>(shared, *comms[static_cast<size_t>(rank)]);
      try {
        trainer->run();
        if (rank == 2) {
          for (auto& comm : comms) comm->abort("rank 2 went home");
          reports.abort("rank 2 went home");
        }
      } catch (const CommError& error) {
        if (rank < 2) reasons[static_cast<size_t>(rank)] = error.what();
      }
      trainer.reset();
    });
  }
  threads.clear();  // joins, which must take far less than the timeout
  for (const std::string& reason : reasons)
    EXPECT_NE(reason.find("rank 2 went home"), std::string::npos) << reason;
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
    EXPECT_THROW(run_training(c, data_, recorder), BadInput);
  }
}

TEST(LearningRate, WarmsUpThenFollowsHalfACosine) {
  TrainConfig c;
  c.lr = 2.0;
  c.warmup_steps = 4;
  c.steps = 104;
  EXPECT_DOUBLE_EQ(learning_rate(c, 0), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(c, 3), 2.0);
  EXPECT_DOUBLE_EQ(learning_rate(c, 4), 2.0);
  EXPECT_NEAR(learning_rate(c, 54), 1.0, 1e-12);
  EXPECT_NEAR(learning_rate(c, 104), 0.0, 1e-12);
  for (int64_t s = 5; s < 104; ++s) EXPECT_LT(learning_rate(c, s), learning_rate(c, s - 1));
  c.warmup_steps = c.steps;  // all warm-up
  EXPECT_DOUBLE_EQ(learning_rate(c, 103), 2.0);
}

TEST(ParameterHash, SeesEveryBitAndTheOrder) {
  std::vector<float> values(100);
  std::iota(values.begin(), values.end(), 1.0f);
  const uint64_t hash = parameter_hash(values);
  std::vector<float> other = values;
  other[57] = std::nextafter(other[57], 1e9f);
  EXPECT_NE(parameter_hash(other), hash);
  other = values;
  std::swap(other[3], other[4]);
  EXPECT_NE(parameter_hash(other), hash);
  other = values;
  other[0] = -0.0f;
  std::vector<float> zero = values;
  zero[0] = 0.0f;
  EXPECT_NE(parameter_hash(other), parameter_hash(zero));
  EXPECT_EQ(hex(0x1f), "000000000000001f");
}

TEST(RankReports, RoundsKeepTheirOrderAndAbortEndsTheWait) {
  LocalRankReports reports(2, std::chrono::seconds(60));
  reports.post(1, {.loss = 10});
  reports.post(1, {.loss = 20});
  reports.post(0, {.loss = 1});
  reports.post(0, {.loss = 2});
  EXPECT_EQ(reports.collect()[1].loss, 10);
  std::vector<RankReports::Report> second = reports.collect();
  EXPECT_EQ(second[0].loss, 2);
  EXPECT_EQ(second[1].loss, 20);
  std::thread aborter([&] { reports.abort("rank 1 failed"); });
  try {
    reports.collect();
    ADD_FAILURE() << "collected a report that was not posted";
  } catch (const CommError& error) {
    EXPECT_STREQ(error.what(), "rank 1 failed");
  }
  aborter.join();
}

TEST(RankReports, NamesTheLateRank) {
  LocalRankReports reports(3, std::chrono::milliseconds(20));
  reports.post(0, {});
  reports.post(2, {});
  expect_error<CommError>([&] { reports.collect(); }, {"rank 1"});
}

}  // namespace
}  // namespace gradwire
