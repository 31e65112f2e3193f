// gradwire-bench step: the cost of the reducer, and the savings of a graph, in a training step in a world of
// 1. A world of 1 has no gradients to reduce.
//
// Compares three ways to enqueue the same step, on the same model, memory and stream: (A) gradients through
// the reducer, as in `gradwire train`; (B) without the reducer, gradients directly to the optimizer; (G) A as
// a graph. Rounds run in the order A B G G B A. A round's ratio is a ratio of sums, so that drift in the
// machine's speed affects all three ways alike. The result is the median over the rounds.
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "bench/commands/main.h"
#include "bench/harness/measure.h"
#include "bench/harness/result_files.h"
#include "collectives/communicator/communicator.h"
#include "collectives/reducer/reducer.h"
#include "runtime/device/graph.h"
#include "runtime/util/error.h"
#include "trainer/data/dataset.h"
#include "trainer/model/vit.h"
#include "trainer/train/optimizer_state.h"
#include "trainer/train/weight_shards.h"

namespace gradwire::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct StepOptions {
  std::string model = "vit_tiny", device = "auto", stop = "20s";
  ResultPaths results;
  std::vector<std::string> compression;
  int64_t batch_size = 32;
};

class TrainingStep {
 public:
  enum Way { reduced, bypassed, graphed };

  TrainingStep(const TrainConfig& config, Communicator& comm)
      : comm_(comm),
        stream_(Stream::create(comm.device(), "step")),
        reducer_(comm, config.compression, gradient_tensors(config.model), {}),
        model_(
            config.model, stream_, reducer_layout(reducer_),
            {.max_batch = config.batch_size, .groups = gradient_groups(config, comm.device(), comm.world())}),
        optimizer_(config, stream_, {{0, model_.layout().elements}}),
        batch_(config.batch_size),
        totals_(make_buffer<double>(comm.device(), 2)) {
    std::vector<float> weights(static_cast<size_t>(model_.layout().elements));
    vit_initialize(model_.parameters(), model_.layout(), 1, weights);
    model_.load(weights);
    const DataSplits data = make_synthetic(config.model, batch_, 1, 1);
    const int64_t pixels = batch_ * data.train.image_elements();
    std::vector<float> images(static_cast<size_t>(pixels));
    for (size_t i = 0; i < images.size(); ++i) images[i] = static_cast<float>(data.train.images[i]) / 128 - 1;
    const std::vector<int32_t> labels(data.train.labels.begin(), data.train.labels.end());
    images_ = make_buffer<float>(comm.device(), pixels);
    labels_ = make_buffer<int32_t>(comm.device(), batch_);
    to_device<float>(stream_, images_.as<float>(), images);
    to_device<int32_t>(stream_, labels_.as<int32_t>(), labels);
    run_ms(reduced);
    graph_ = Graph::capture(stream_, [&] { enqueue(true); });
    graph_.launch();
    captured_ = reducer_.steps() - 1;
    stream_.synchronize();
  }

  // Runs a step in one way. Returns the milliseconds from the first enqueue to the completion of the last
  // work.
  double run_ms(Way way) {
    const auto begin = Clock::now();
    optimizer_.prepare(stream_, step_++, 1e-4);
    if (way == graphed) {
      graph_.launch();
      reducer_.replayed(captured_);
    } else {
      enqueue(way == reduced);
    }
    stream_.synchronize();
    if (way != bypassed) {
      comm_.check();
      reducer_.stats(reducer_.steps() - 1);
    }
    return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
  }

 private:
  void enqueue(bool through_reducer) {
    const std::function<void(int)> ready = [&](int i) { reducer_.ready(i, stream_); };
    float* gradients = reducer_.gradients().as<float>();
    model_.forward(images_.as<float>(), batch_);
    model_.backward(labels_.as<int32_t>(), totals_.as<double>(), 1.0f / static_cast<float>(batch_), gradients,
                    false, through_reducer ? ready : std::function<void(int)>());
    if (through_reducer) reducer_.wait(stream_);
    optimizer_.step(stream_, {model_.weights().as<float>()}, {gradients});
  }

  Communicator& comm_;
  Stream stream_;
  Reducer reducer_;
  Vit model_;
  Optimizer optimizer_;
  const int64_t batch_;
  int64_t step_ = 0, captured_ = 0;
  Buffer totals_, images_, labels_;
  Graph graph_;
};

struct Result {
  int rounds = 0;
  Timing times[3];  // of a step in each way
  double reducer_ratio = 0, graph_ratio = 0;
};

double median(const std::vector<double>& values) {
  return summarize(values).median_us;
}

// Runs rounds until `stop` ends the measurement of the steps through the reducer. Each round has two steps.
Result measure(TrainingStep& step, const StopRule& stop, SmClock& sm_clock) {
  Samples samples[3];
  std::vector<double> reducer_ratios, graph_ratios;
  const auto start = Clock::now();
  auto done = [&] {
    const double elapsed_s = std::chrono::duration<double>(Clock::now() - start).count();
    return samples[TrainingStep::reduced].done(stop, elapsed_s);
  };
  Result result;
  for (bool warm = false; !done() || result.rounds < StopRule::kLeastSamples; warm = true) {
    double sums[3] = {};
    for (TrainingStep::Way way : {TrainingStep::reduced, TrainingStep::bypassed, TrainingStep::graphed,
                                  TrainingStep::graphed, TrainingStep::bypassed, TrainingStep::reduced}) {
      const double taken = step.run_ms(way);
      sums[way] += taken;
      if (warm) samples[way].add(taken * 1e3);
    }
    sm_clock.sample();
    if (!warm) continue;
    ++result.rounds;
    reducer_ratios.push_back(sums[TrainingStep::reduced] / sums[TrainingStep::bypassed]);
    graph_ratios.push_back(sums[TrainingStep::graphed] / sums[TrainingStep::reduced]);
  }
  for (int way = 0; way < 3; ++way) result.times[way] = samples[way].timing();
  sm_clock.report(result.times[TrainingStep::reduced]);
  result.reducer_ratio = median(reducer_ratios);
  result.graph_ratio = median(graph_ratios);
  return result;
}

void run(const StepOptions& options) {
  TrainConfig config;
  config.model = named_model(options.model);
  config.batch_size = options.batch_size;
  const StopRule stop = StopRule::parse(options.stop);
  ResultFiles results(options.results);
  std::vector<std::string> specs = options.compression;
  if (specs.empty()) specs = {"fp32", "powersgd:rank=4"};
  nlohmann::ordered_json document = nlohmann::ordered_json::array();
  fmt::print("{:<10} {:<8} {:<24} {:>7} {:>12} {:>12} {:>12} {:>9} {:>9}\n", "model", "device", "compression",
             "rounds", "reducer ms", "bypassed ms", "graph ms", "reducer", "graph");
  for (const Device device : devices_for(options.device)) {
    for (const std::string& spec : specs) {
      config.compression = CompressionSpec::parse(spec);
      auto comm = Communicator::create_single(device);
      TrainingStep step(config, *comm);
      SmClock sm_clock(device);
      const Result r = measure(step, stop, sm_clock);
      auto ms = [&](TrainingStep::Way way) { return r.times[way].median_us / 1e3; };
      fmt::print("{:<10} {:<8} {:<24} {:>7} {:>12.3f} {:>12.3f} {:>12.3f} {:>8.4f}x {:>8.4f}x\n",
                 options.model, device.name(), spec, r.rounds, ms(TrainingStep::reduced),
                 ms(TrainingStep::bypassed), ms(TrainingStep::graphed), r.reducer_ratio, r.graph_ratio);
      std::fflush(stdout);
      document.push_back({{"model", options.model},
                          {"device", device.name()},
                          {"batch_size", options.batch_size},
                          {"compression", config.compression.to_string()},
                          {"rounds", r.rounds},
                          {"reducer_ms", ms(TrainingStep::reduced)},
                          {"bypassed_ms", ms(TrainingStep::bypassed)},
                          {"graph_ms", ms(TrainingStep::graphed)},
                          {"reducer_ratio", r.reducer_ratio},
                          {"graph_ratio", r.graph_ratio},
                          {"reducer", timing_json(r.times[TrainingStep::reduced], stop.to_string())},
                          {"bypassed", timing_json(r.times[TrainingStep::bypassed], stop.to_string())},
                          {"graph", timing_json(r.times[TrainingStep::graphed], stop.to_string())}});
    }
  }
  results.write(document);
}

}  // namespace

void add_step(CLI::App& app, int&) {
  auto options = std::make_shared<StepOptions>();
  CLI::App* command = app.add_subcommand(
      "step",
      "A training step in a world of 1: through the reducer, with the reducer bypassed, and as a graph");
  command->add_option("--model", options->model, "A model of `gradwire train`")->capture_default_str();
  add_device(*command, options->device)->capture_default_str();
  command->add_option("--batch-size", options->batch_size, "Images per step")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  command
      ->add_option("--compression", options->compression,
                   "Compression spec; repeatable (default: fp32, powersgd:rank=4)")
      ->expected(1)
      ->take_all();
  add_stop(*command, options->stop);
  add_result_files(*command, options->results);
  command->callback([options] { run(*options); });
}

}  // namespace gradwire::bench
