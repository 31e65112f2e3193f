// gradwire-bench step: the cost of the reducer, and the savings of a graph, in a training step in a world of
// 1. A world of 1 has no gradients to reduce.
//
// Compares three ways to enqueue the same step, on the same model, memory and stream: (A) gradients through
// the reducer, as in `gradwire train`; (B) without the reducer, gradients directly to the optimizer; (G) A as
// a graph. Rounds run in the order A B G G B A. A round's ratio is a ratio of sums, so that drift in the
// machine's speed affects all three ways alike. The result is the median over the rounds.

#include <chrono>

#include "bench/harness/command.h"
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

class StepCommand final : public Command {
 public:
  explicit StepCommand(CLI::App& app)
      : Command(app, "step",
                "A training step in a world of 1: through the reducer, with the reducer bypassed, and as a "
                "graph") {
    stop_text_ = "20s";
    config_.batch_size = 32;
    add("--model", model_, "A model of `gradwire train`")->capture_default_str();
    add_device()->capture_default_str();
    add("--batch-size", config_.batch_size, "Images per step", CLI::Range(int64_t{1}, int64_t{1} << 20))
        ->capture_default_str();
    add_repeatable("--compression", specs_, "Compression spec; repeatable (default: fp32, powersgd:rank=4)")
        ->type_name("SPEC");
    add_stop();
    add_files();
    columns_ = {{"model", "model", -10},
                {"device", "device", -8},
                {"compression", "spec", -24},
                {"rounds", "rounds", 7},
                {"reducer ms", "reducer_ms", 12, 3},
                {"bypassed ms", "bypassed_ms", 12, 3},
                {"graph ms", "graph_ms", 12, 3},
                {"reducer", "reducer_ratio", 9, 4, "x"},
                {"graph", "graph_ratio", 9, 4, "x"}};
  }

  int run() override {
    config_.model = named_model(model_);
    open();
    if (specs_.empty()) specs_ = {"fp32", "powersgd:rank=4"};
    print_heading();
    for (const Device device : devices_for(device_)) {
      for (const std::string& spec : specs_) {
        config_.compression = CompressionSpec::parse(spec);
        auto comm = Communicator::create_single(device);
        TrainingStep step(config_, *comm);
        add_row(measure(step, device), {{"spec", spec}});
      }
    }
    write_files();
    return 0;
  }

 private:
  // Runs rounds until --stop ends the measurement of the steps through the reducer. Each round has two steps.
  Json measure(TrainingStep& step, Device device) const {
    SmClock sm_clock(device);
    Samples samples[3];
    std::vector<double> reducer_ratios, graph_ratios;
    const auto start = Clock::now();
    int rounds = 0;
    auto done = [&] {
      const double elapsed_s = std::chrono::duration<double>(Clock::now() - start).count();
      return samples[TrainingStep::reduced].done(stop_, elapsed_s);
    };
    for (bool warm = false; !done() || rounds < StopRule::kMinSamples; warm = true) {
      double sums[3] = {};
      for (TrainingStep::Way way : {TrainingStep::reduced, TrainingStep::bypassed, TrainingStep::graphed,
                                    TrainingStep::graphed, TrainingStep::bypassed, TrainingStep::reduced}) {
        const double taken = step.run_ms(way);
        sums[way] += taken;
        if (warm) samples[way].add(taken * 1e3);
      }
      sm_clock.sample();
      if (!warm) continue;
      ++rounds;
      reducer_ratios.push_back(sums[TrainingStep::reduced] / sums[TrainingStep::bypassed]);
      graph_ratios.push_back(sums[TrainingStep::graphed] / sums[TrainingStep::reduced]);
    }
    Timing times[3];
    for (int way = 0; way < 3; ++way) times[way] = samples[way].timing();
    sm_clock.report(times[TrainingStep::reduced]);
    return {{"model", model_},
            {"device", device.name()},
            {"batch_size", config_.batch_size},
            {"compression", config_.compression.to_string()},
            {"rounds", rounds},
            {"reducer_ms", times[TrainingStep::reduced].median_us / 1e3},
            {"bypassed_ms", times[TrainingStep::bypassed].median_us / 1e3},
            {"graph_ms", times[TrainingStep::graphed].median_us / 1e3},
            {"reducer_ratio", summarize(reducer_ratios).median_us},
            {"graph_ratio", summarize(graph_ratios).median_us},
            {"reducer", timing_json(times[TrainingStep::reduced])},
            {"bypassed", timing_json(times[TrainingStep::bypassed])},
            {"graph", timing_json(times[TrainingStep::graphed])}};
  }

  std::string model_ = "vit_tiny";
  std::vector<std::string> specs_;
  TrainConfig config_;
};

}  // namespace

std::unique_ptr<Command> make_step(CLI::App& app) {
  return std::make_unique<StepCommand>(app);
}

}  // namespace gradwire::bench
