// --elastic: ranks are processes that are killed or stopped while they train. The others go on, with the same bits as
// each other; nothing is lost but the residuals of the dead, of which the run says how large they were.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "collectives/communicator/communicator.h"
#include "collectives/reducer/reducer.h"
#include "collectives/transport/tcp.h"
#include "runtime/error.h"
#include "runtime/mix.h"
#include "tests/processes/processes.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/config/run.h"
#include "trainer/data/dataset.h"
#include "trainer/log/run_log.h"
#include "trainer/train/elastic.h"
#include "trainer/train/layout.h"

namespace gradwire {
namespace {

using nlohmann::json;
using testing::Me;
using testing::Outcome;
using testing::run_processes;
using namespace std::chrono_literals;

// "5 3 kill 9 0 stop": after step 5 rank 3 is killed, after step 9 rank 0 is stopped. "soon": killed within 5 ms.
struct Fate {
  int64_t step = 0;
  int rank = 0;
  std::string what;
};

std::vector<Fate> fates_of(const std::string& text) {
  std::vector<Fate> all;
  std::istringstream words(text);
  for (Fate f; words >> f.step >> f.rank >> f.what;) all.push_back(f);
  return all;
}

std::unique_ptr<Communicator> join(const Me& me) {
  TcpOptions options;
  options.group = {
      .rendezvous = me.rendezvous, .rank = me.rank, .world = me.world, .timeout = me.timeout, .joining = 60s};
  options.shrinkable = true;
  return Communicator::create_tcp(options);
}

std::vector<std::string> lines_with(const std::string& word, const std::string& text) {
  std::vector<std::string> found;
  std::istringstream all(text);
  for (std::string line; std::getline(all, line);) {
    if (line.starts_with(word)) found.push_back(line.substr(word.size()));
  }
  return found;
}

// ---- Conservation: a reducer whose gradients are known ------------------------------------------------------

const std::vector<GradientTensor> kTensors = {{"a", {48, 32}}, {"b", {40}}, {"c", {20, 3, 11}}};

float gradient(int rank, int64_t step, int tensor, int64_t element) {
  uint64_t hash =
      mix(mix(static_cast<uint64_t>(rank + 1), static_cast<uint64_t>(step)), static_cast<uint64_t>(tensor));
  hash = mix(hash, static_cast<uint64_t>(element));
  return static_cast<float>(hash >> 40) / static_cast<float>(1 << 23) - 1.0f;
}

void write_floats(const std::string& path, const std::vector<float>& values) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(values.data()),
             static_cast<std::streamsize>(values.size() * sizeof(float)));
}

std::vector<double> read_floats(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<double> values;
  for (float value; file.read(reinterpret_cast<char*>(&value), sizeof value);) values.push_back(value);
  return values;
}

std::string residual_path(const std::string& folder, int rank, int64_t step) {
  return fmt::format("{}/residual.{}.{}", folder, rank, step);
}

// Averages gradients as a RankTrainer does, and adds up what is applied where that has its weights. Each rank's residual
// is in a file by the time anybody can know that the step is done.
class Averaging {
 public:
  Averaging(const Me& me, Elastic& elastic)
      : me_(me),
        elastic_(elastic),
        comm_(elastic.comm()),
        stream_(Stream::create(Device::host(), "test")),
        reducer_(comm_, CompressionSpec::parse(me.option("spec")), kTensors, {.seed = 7}),
        layout_(reducer_layout(reducer_)),
        applied_(make_buffer<float>(Device::host(), layout_.elements)),
        residual_(static_cast<size_t>(layout_.elements)) {
    for (const GradientTensor& tensor : kTensors) parameters_.push_back({tensor.name, tensor.shape});
    fill_zero(stream_, applied_.data(), applied_.bytes());
    stream_.synchronize();
  }
  ~Averaging() {
    try {
      stream_.synchronize();
    } catch (...) {
    }
  }

  void run(int64_t steps, const std::vector<Fate>& fates) {
    int64_t step = 0;
    if (elastic_.start()) {
      step = elastic_.start()->position.step;
      if (elastic_.restore(state())) throw std::runtime_error("WRONG: a residual has no place");
      const ShrinkRecord record = elastic_.resumed();
      std::printf("shrink: %s\n", json{{"step", record.step},
                                       {"lost", record.lost},
                                       {"norms", record.lost_residual_norms},
                                       {"ranks", record.ranks}}
                                      .dump()
                                      .c_str());
    } else {
      elastic_.keep(state(), {}, {});
    }
    for (; step < steps; ++step) {
      while (doomed_) pause();  // at most one step more
      for (const Fate& fate : fates) {
        if (fate.step != step || fate.rank != me_.rank) continue;
        doomed_ = true;
        std::thread(die_soon).detach();
      }
      average(step);
    }
    write_floats(fmt::format("{}/applied.{}", me_.option("folder"), me_.rank),
                 {applied_.as<float>(), applied_.as<float>() + layout_.elements});
  }

 private:
  static void die_soon() {
    std::this_thread::sleep_for(std::chrono::microseconds(std::random_device()() % 2000));
    raise(SIGKILL);
  }

  void average(int64_t step) {
    for (int i = 0; i < reducer_.tensors(); ++i) {
      stream_.submit([this, step, i] {
        for (int64_t e = 0; e < kTensors[static_cast<size_t>(i)].count(); ++e) {
          reducer_.gradient(i)[e] = gradient(me_.rank, step, i, e);
        }
      });
      reducer_.ready(i, stream_);
    }
    reducer_.wait(stream_);
    stream_.submit([this] {
      const auto* mean = reducer_.gradients().as<const float>();
      auto* applied = applied_.as<float>();
      for (int64_t e = 0; e < layout_.elements; ++e)
        applied[e] += mean[e] * static_cast<float>(comm_.world());
    });
    for (const TensorState& s : reducer_.tensor_state()) {
      if (s.kind != kResidualKind) continue;
      float* const to = residual_.data() + layout_.offsets[static_cast<size_t>(s.tensor)];
      s.read(stream_, 0, std::as_writable_bytes(std::span<float>(to, static_cast<size_t>(s.count()))));
    }
    stream_.submit(
        [this, step] { write_floats(residual_path(me_.option("folder"), me_.rank, step + 1), residual_); });
    elastic_.keep(state(), {.step = step + 1}, {});
    stream_.synchronize();
  }

  RankState state() {
    return {.comm = comm_,
            .stream = stream_,
            .reducer = reducer_,
            .parameters = parameters_,
            .layout = layout_,
            .weights = {applied_.as<float>()},
            .moments = {},
            .parts = reducer_.owned()};
  }

  const Me& me_;
  Elastic& elastic_;
  Communicator& comm_;
  Stream stream_;
  Reducer reducer_;
  std::vector<VitParameter> parameters_;
  ParameterLayout layout_;
  Buffer applied_;
  std::vector<float> residual_;
  bool doomed_ = false;
};

RANK_PROGRAM(AveragesElastically) {
  const auto first = join(me);
  TrainConfig config;
  config.devices.assign(static_cast<size_t>(me.world), Device::host());
  config.processes = true;
  config.elastic = {2, me.world};
  config.timeout_s = 20;
  Elastic elastic(config, *first);
  while (true) {
    try {
      if (!elastic.agree()) return;
      Averaging(me, elastic).run(me.number("steps"), fates_of(me.option("fates")));
      elastic.comm().barrier();
      return;
    } catch (const CommError& error) {
      elastic.comm().abort(error.what());
      if (!elastic.has_begun()) throw;
      elastic.regroup(error.what());
    }
  }
}

double norm_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double x : values) sum += x * x;
  return std::sqrt(sum);
}

// What was applied, and what every rank still holds or held when it died, is the sum of all gradients.
void expect_conservation(const std::string& spec, int world, const std::string& fates,
                         const std::set<int>& dead) {
  SCOPED_TRACE(spec + ", " + fates);
  constexpr int64_t steps = 12;
  const std::string folder = testing::scratch_path(fmt::format("averages.{}.{}", spec, world));
  std::filesystem::create_directories(folder);
  const auto ranks = run_processes(
      "AveragesElastically", world,
      {.options = {{"spec", spec}, {"fates", fates}, {"steps", std::to_string(steps)}, {"folder", folder}}});
  std::vector<int> left;
  for (int r = 0; r < world; ++r) {
    const Outcome& rank = ranks[static_cast<size_t>(r)];
    EXPECT_EQ(rank.exit_code, dead.contains(r) ? -1 : 0) << "rank " << r << ": " << rank.output;
    if (!dead.contains(r)) left.push_back(r);
  }
  if (::testing::Test::HasFailure()) return;
  const std::vector<double> applied = read_floats(fmt::format("{}/applied.{}", folder, left[0]));
  ASSERT_FALSE(applied.empty());
  std::vector<double> sum = applied;
  const auto add = [&](const std::string& path) {
    const std::vector<double> values = read_floats(path);
    ASSERT_EQ(values.size(), sum.size()) << path;
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
  };
  for (const int r : left) {
    EXPECT_EQ(read_floats(fmt::format("{}/applied.{}", folder, r)), applied)
        << "rank " << r << " has other bits";
    add(residual_path(folder, r, steps));
  }
  // Who took part in which step: the last record of a step counts, which knows of all lost by then.
  std::map<int64_t, std::vector<int>> group_from;
  std::vector<int> all(static_cast<size_t>(world));
  std::iota(all.begin(), all.end(), 0);
  group_from[0] = all;
  size_t told = 0;
  for (const std::string& line : lines_with("shrink: ", ranks[static_cast<size_t>(left[0])].output)) {
    const json record = json::parse(line);
    const auto step = record["step"].get<int64_t>();
    group_from[step] = record["ranks"].get<std::vector<int>>();
    for (size_t i = 0; i < record["lost"].size(); ++i, ++told) {
      const std::string path = residual_path(folder, record["lost"][i].get<int>(), step);
      const double norm = step == 0 ? 0 : norm_of(read_floats(path));
      EXPECT_NEAR(record["norms"][i].get<double>(), norm, 1e-6 * norm) << line;
      if (step > 0) {
        EXPECT_GT(norm, 0) << line;
        add(path);
      }
    }
  }
  EXPECT_EQ(told, dead.size());
  std::vector<double> gradients(sum.size());
  for (int64_t step = 0; step < steps; ++step) {
    for (const int r : std::prev(group_from.upper_bound(step))->second) {
      const GradientLayout layout = lay_out(kTensors, 4, 25 << 20);
      for (size_t t = 0; t < kTensors.size(); ++t) {
        for (int64_t e = 0; e < kTensors[t].count(); ++e) {
          gradients[static_cast<size_t>(layout.offsets[t] + e)] += gradient(r, step, static_cast<int>(t), e);
        }
      }
    }
  }
  for (size_t i = 0; i < sum.size(); ++i) sum[i] -= gradients[i];
  EXPECT_LT(norm_of(sum) / norm_of(gradients), 1e-6);
}

TEST(Elastic, NothingIsLostButTheResidualsOfTheDeadWhoseNormsAreTold) {
  expect_conservation("int8", 4, "3 3 kill 7 1 kill", {1, 3});
  expect_conservation("powersgd:rank=2", 4, "4 0 kill 4 2 kill", {0, 2});
  expect_conservation("powersgd:rank=2,wire=bf16", 3, "5 0 kill", {0});
}

// ---- The run as a whole -------------------------------------------------------------------------------------

VitConfig tiny_model() {
  VitConfig model{.name = "tiny"};
  model.image = 4, model.patch = 2, model.channels = 1, model.classes = 4;
  model.width = 8, model.depth = 1, model.heads = 2, model.mlp = 16;
  return model;
}

DataSplits tiny_data() {
  return make_synthetic(tiny_model(), 200, 10, 1);
}

constexpr int64_t kSteps = 24, kCheckpointEvery = 4;

// 32 images per step with 4 ranks: 6 steps are an epoch.
TrainConfig tiny_run(int world, const std::string& spec) {
  TrainConfig config;
  config.model = tiny_model();
  config.devices.assign(static_cast<size_t>(world), Device::host());
  config.compression = CompressionSpec::parse(spec);
  config.batch_size = 8;
  config.steps = kSteps;
  config.warmup_steps = 2;
  config.lr = 1e-2;
  config.seed = 3;
  config.eval_batch_size = 8;
  config.timeout_s = 20;
  return config;
}

std::string pid_path(const std::string& folder, int rank) {
  return fmt::format("{}/pid.{}", folder, rank);
}

// Keeps the log, and has the fates strike: whoever is rank 0 does.
class Watcher final : public RunObserver {
 public:
  Watcher(const Me& me, const TrainConfig& config, const DataSplits& data)
      : me_(me),
        fates_(fates_of(me.option("fates"))),
        log_(me.option("folder") + "/run.jsonl", config, data) {}

  void on_run(const RunInfo& info) override { log_.on_run(info); }
  void on_step(const StepRecord& step) override {
    log_.on_step(step);
    for (size_t i = 0; i < fates_.size(); ++i) {
      const Fate& fate = fates_[i];
      if (step.step < fate.step || !struck_.insert(i).second) continue;
      const int signal = fate.what == "stop" ? SIGSTOP : SIGKILL;
      pid_t pid = 0;
      std::ifstream(pid_path(me_.option("folder"), fate.rank)) >> pid;
      if (pid <= 0) throw std::runtime_error("WRONG: no process to kill");
      if (fate.what != "soon") {
        kill(pid, signal);
        continue;
      }
      std::thread([pid, signal, after = std::chrono::microseconds(std::random_device()() % 5000)] {
        std::this_thread::sleep_for(after);
        kill(pid, signal);
      }).detach();
    }
    if (step.step >= kSteps - 6 && me_.option("fates").find("soon") != std::string::npos) {
      std::this_thread::sleep_for(20ms);  // nobody gets to the end before its fate
    }
  }
  void on_shrink(const ShrinkRecord& shrink) override {
    log_.on_shrink(shrink);
    std::printf("lost %s in %.3f s\n", fmt::format("{}", fmt::join(shrink.lost, ", ")).c_str(),
                shrink.seconds);
  }
  void on_eval(const EvalRecord& eval) override { log_.on_eval(eval); }
  void on_checkpoint(const CheckpointRecord& checkpoint) override { log_.on_checkpoint(checkpoint); }
  void on_end(const EndRecord& end) override { std::printf("end: %016lx\n", end.parameter_hash); }

 private:
  const Me& me_;
  const std::vector<Fate> fates_;
  std::set<size_t> struck_;
  RunLog log_;
};

RANK_PROGRAM(TrainsElastically) {
  const std::string folder = me.option("folder");
  std::ofstream(pid_path(folder, me.rank)) << getpid() << std::endl;
  const auto comm = join(me);
  TrainConfig config = tiny_run(me.world, me.option("spec"));
  config.processes = true;
  config.elastic = {me.number("least"), me.world};
  config.elastic_batch =
      me.option("batch") == "keep-local" ? ElasticBatch::keep_local : ElasticBatch::keep_global;
  config.graph = me.option("graph") == "on";
  config.timeout_s = static_cast<double>(me.timeout.count()) * 1e-3;
  if (me.option("checkpoints") == "on") {
    config.checkpoint_directory = folder + "/saved";
    config.checkpoint_every = kCheckpointEvery;
    config.checkpoint_keep = 100;
  }
  const DataSplits data = tiny_data();
  Watcher watcher(me, config, data);
  run_training(config, data, watcher, *comm);
}

struct Case {
  std::string spec = "int8", fates;
  int world = 4, least = 1;
  std::string batch = "keep-global", checkpoints = "off", graph = "off";
  std::chrono::milliseconds timeout = 20s;
};

struct Trained {
  std::string folder;
  std::vector<Outcome> ranks;
  std::vector<json> log;
  std::vector<json> records(const std::string& type) const {
    std::vector<json> found;
    for (const json& record : log) {
      if (record["type"] == type) found.push_back(record);
    }
    return found;
  }
};

// Runs the case, whose fates kill or stop `dead`; all others must end in good order.
Trained train(const Case& c, const std::set<int>& dead) {
  static int runs = 0;
  Trained trained{.folder = testing::scratch_path(fmt::format("elastic{}", runs++)), .ranks = {}, .log = {}};
  std::filesystem::create_directories(trained.folder);
  testing::ProcessOptions options{.timeout = c.timeout,
                                  .options = {{"spec", c.spec},
                                              {"fates", c.fates},
                                              {"least", std::to_string(c.least)},
                                              {"batch", c.batch},
                                              {"graph", c.graph},
                                              {"checkpoints", c.checkpoints},
                                              {"folder", trained.folder}}};
  for (const Fate& fate : fates_of(c.fates)) {
    if (fate.what == "stop") options.never_ending.push_back(fate.rank);
  }
  trained.ranks = run_processes("TrainsElastically", c.world, options);
  for (int r = 0; r < c.world; ++r) {
    const Outcome& rank = trained.ranks[static_cast<size_t>(r)];
    if (c.least == 1) {
      EXPECT_EQ(rank.exit_code, dead.contains(r) ? -1 : 0) << "rank " << r << ": " << rank.output;
    }
    for (const std::string& line : lines_with("lost ", rank.output))
      fmt::print("{}: lost {}\n", c.fates, line);
  }
  std::ifstream log(trained.folder + "/run.jsonl");
  for (std::string line; std::getline(log, line);) trained.log.push_back(json::parse(line));
  return trained;
}

// Each step at most once, in order. A step that all had done when a rank was lost, but that was not reported yet, is not
// in the log: two at most for each loss.
void expect_steps(const Trained& trained) {
  int64_t last = -1, missing = 0;
  for (const json& record : trained.records("step")) {
    const auto step = record["step"].get<int64_t>();
    EXPECT_GT(step, last);
    missing += step - last - 1;
    last = step;
  }
  missing += kSteps - 1 - last;
  EXPECT_LE(missing, 2 * static_cast<int64_t>(trained.records("shrink").size()));
}

std::vector<int> lost_in(const Trained& trained) {
  std::vector<int> lost;
  for (const json& record : trained.records("shrink")) {
    for (const int rank : record["lost"]) lost.push_back(rank);
  }
  return lost;
}

TEST(Elastic, FromFourToThreeToTwoRanksWithACheckpointThatLoads) {
  for (const auto& [spec, graph] : {std::pair("powersgd:rank=2", "off"), std::pair("int8", "on")}) {
    SCOPED_TRACE(spec);
    const Trained trained =
        train({.spec = spec, .fates = "6 3 kill 14 1 kill", .checkpoints = "on", .graph = graph}, {1, 3});
    expect_steps(trained);
    EXPECT_EQ(lost_in(trained), (std::vector<int>{3, 1}));
    for (const json& record : trained.records("shrink")) {
      for (const json& norm : record["lost_residual_norms"]) EXPECT_GT(norm.get<double>(), 0);
      EXPECT_EQ(record["global_batch"], 32);
    }
    // Rank 0 compares all ranks' weights at the end.
    EXPECT_EQ(lines_with("end: ", trained.ranks[0].output).size(), 1u);
    for (int64_t step = kCheckpointEvery; step <= kSteps; step += kCheckpointEvery) {
      EXPECT_GT(checkpoint_world(NewCheckpoint::final_path(trained.folder + "/saved", step)), 0) << step;
    }
    EXPECT_EQ(checkpoint_world(NewCheckpoint::final_path(trained.folder + "/saved", kSteps)), 2);
    TrainConfig rest = tiny_run(3, spec);
    rest.resume = NewCheckpoint::final_path(trained.folder + "/saved", 12);
    EXPECT_EQ(checkpoint_world(rest.resume), 3);
    RunObserver nobody;
    run_training(rest, tiny_data(), nobody);
  }
}

TEST(Elastic, AnotherRankTakesThePlaceOfRankZero) {
  const Trained trained = train({.fates = "5 0 kill 13 1 kill 17 3 kill", .checkpoints = "on"}, {0, 1, 3});
  expect_steps(trained);
  EXPECT_EQ(lost_in(trained), (std::vector<int>{0, 1, 3}));
  EXPECT_EQ(trained.log[0]["type"], "run");
  EXPECT_EQ(trained.records("run").size(), 1u);
  EXPECT_EQ(lines_with("end: ", trained.ranks[2].output).size(), 1u);
  std::vector<int64_t> evaluated;
  for (const json& record : trained.records("eval")) evaluated.push_back(record["step"].get<int64_t>());
  EXPECT_EQ(evaluated, (std::vector<int64_t>{6, 12, 18, 24}));
  for (int64_t step = kCheckpointEvery; step <= kSteps; step += kCheckpointEvery) {
    EXPECT_GT(checkpoint_world(NewCheckpoint::final_path(trained.folder + "/saved", step)), 0) << step;
  }
}

// FP32 keeps no residuals, and the images of a step stay the same: so do its losses, but for the order of additions.
TEST(Elastic, WithoutCompressionARunThatLosesRanksTrainsLikeOneThatLosesNone) {
  struct Losses : RunObserver {
    void on_step(const StepRecord& step) override { of[step.step] = step.loss; }
    std::map<int64_t, double> of;
  } whole;
  run_training(tiny_run(4, "fp32"), tiny_data(), whole);
  const Trained trained = train({.spec = "fp32", .fates = "4 2 kill 9 0 kill"}, {0, 2});
  expect_steps(trained);
  for (const json& record : trained.records("step")) {
    const double expected = whole.of.at(record["step"].get<int64_t>());
    EXPECT_NEAR(record["loss"].get<double>(), expected, 1e-4 * expected) << record;
  }
}

TEST(Elastic, KeepLocalKeepsEachRanksBatchAndLowersTheLearningRate) {
  const Trained trained = train({.fates = "4 3 kill", .batch = "keep-local"}, {3});
  expect_steps(trained);
  const json record = trained.records("shrink").at(0);
  EXPECT_EQ(record["global_batch"], 24);
  EXPECT_DOUBLE_EQ(record["lr"].get<double>(), 0.75e-2);
}

TEST(Elastic, AStoppedRankIsLeftBehindAfterTheDeadline) {
  for (const int who : {0, 2}) {
    const Trained trained = train(
        {.fates = fmt::format("5 {} stop", who), .world = 3, .checkpoints = "on", .timeout = 3s}, {who});
    expect_steps(trained);
    EXPECT_EQ(lost_in(trained), (std::vector<int>{who}));
  }
}

// GRADWIRE_KILLS: how often.
TEST(Elastic, RanksKilledAtAnyTimeLeaveARunThatEndsInGoodOrder) {
  const char* given = std::getenv("GRADWIRE_KILLS");
  const int runs = given == nullptr ? 3 : std::atoi(given);
  const char* specs[] = {"int8", "powersgd:rank=2", "fp32"};
  for (int run = 0; run < runs; ++run) {
    std::mt19937 random(static_cast<uint32_t>(run));
    const int world = 3 + static_cast<int>(random() % 2);
    std::vector<int> order(static_cast<size_t>(world));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    const size_t deaths = 1 + random() % static_cast<size_t>(world - 1);
    std::string fates;
    std::set<int> lost;
    for (size_t i = 0; i < deaths; ++i) {
      fates += fmt::format("{} {} soon ", random() % (kSteps - 6), order[i]);
      lost.insert(order[i]);
    }
    SCOPED_TRACE(fates);
    const Trained trained = train({.spec = specs[run % 3],
                                   .fates = fates,
                                   .world = world,
                                   .batch = random() % 2 == 0 ? "keep-global" : "keep-local",
                                   .checkpoints = random() % 2 == 0 ? "on" : "off"},
                                  lost);
    expect_steps(trained);
    const std::vector<int> told = lost_in(trained);
    EXPECT_EQ(std::set<int>(told.begin(), told.end()), lost);
    EXPECT_EQ(told.size(), lost.size());
  }
}

TEST(Elastic, FewerThanTheLeastEndWithAnErrorThatSaysSo) {
  const Trained trained = train({.fates = "5 1 kill", .world = 3, .least = 3, .checkpoints = "on"}, {});
  for (const size_t r : {size_t{0}, size_t{2}}) {
    EXPECT_EQ(trained.ranks[r].exit_code, 4);
    for (const char* part : {"2 of 3 ranks are left (lost: 1), fewer than the 3 that --elastic 3:3 asks for",
                             "/saved --resume "}) {
      EXPECT_NE(trained.ranks[r].output.find(part), std::string::npos) << trained.ranks[r].output;
    }
  }
}

}  // namespace
}  // namespace gradwire
