#include "trainer/cli/session.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>

#include "collectives/communicator/communicator.h"
#include "runtime/util/file.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/log/console.h"
#include "trainer/log/run_log.h"
#include "trainer/measure/products.h"
#include "trainer/train/memory_plan.h"
#include "trainer/train/run.h"
#include "trainer/train/saved_plan.h"

namespace gradwire {
namespace {

// Passes each record to several observers, in order.
class Fan final : public RunObserver {
 public:
  explicit Fan(std::vector<RunObserver*> observers) : observers_(std::move(observers)) {}
  void on_run(const RunInfo& record) override { pass(&RunObserver::on_run, record); }
  void on_step(const StepRecord& record) override { pass(&RunObserver::on_step, record); }
  void on_waits(const WaitRecord& record) override { pass(&RunObserver::on_waits, record); }
  void on_shrink(const ShrinkRecord& record) override { pass(&RunObserver::on_shrink, record); }
  void on_grow(const GrowRecord& record) override { pass(&RunObserver::on_grow, record); }
  void on_replan(const ReplanRecord& record) override { pass(&RunObserver::on_replan, record); }
  void on_eval(const EvalRecord& record) override { pass(&RunObserver::on_eval, record); }
  void on_checkpoint(const CheckpointRecord& record) override { pass(&RunObserver::on_checkpoint, record); }
  void on_end(const EndRecord& record) override { pass(&RunObserver::on_end, record); }

 private:
  template <typename Record>
  void pass(void (RunObserver::*on)(const Record&), const Record& record) {
    for (RunObserver* observer : observers_) (observer->*on)(record);
  }

  std::vector<RunObserver*> observers_;
};

}  // namespace

void say(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

bool leads(const RunOptions& o) {
  return !o.launch || o.launch->rank == 0;
}

void say_start(const Resolved& run, const RunOptions& o) {
  say(run.device_line);
  if (run.config.devices.front().is_host()) say("Products: " + host_products_text());
  if (o.launch) {
    std::string rendezvous = o.rendezvous.empty() ? o.launch->rendezvous : o.rendezvous;
    say("Launcher: " + o.launch->launcher + (o.launch->world == 1 ? " with one process" : "") + " (" +
        o.launch->variables + ")" +
        (o.launch->world > 1 && !rendezvous.empty() ? ", rendezvous at " + rendezvous : ""));
  }
  if (run.config.link)
    say("Links: emulated, " + run.config.link.to_string() + " for each rank and direction");
  for (const std::string& note : run.notes) say(note);
  const Dataset& train = run.data.train;
  say(fmt::format("Data: {}, {} training and {} test images of {}x{}x{}", run.config.data.to_string(),
                  human_count(static_cast<double>(train.count())),
                  human_count(static_cast<double>(run.data.test.count())), train.channels, train.height,
                  train.width));
}

void say_plan(const TrainConfig& config) {
  say(config_text(config));
  say(memory_text(config, plan_memory(config)));
}

void train_part(const TrainConfig& config, const DataSplits& data, RunObserver& observer,
                const RunPart& part) {
  if (part.join_group) {
    join_training(config, data, observer, part.join_group);
  } else if (part.comm != nullptr) {
    run_training(config, data, observer, *part.comm, part.plan);
  } else {
    run_training(config, data, observer, part.plan);
  }
}

AutoPlan auto_plan(const Resolved& run, const RunOptions& o) {
  Choices choices = run.automatic->choices({});
  // Larger buckets take more memory, so a limit keeps the default.
  if (!o.bucket_mb.empty() || run.config.memory_limit > 0)
    choices.bucket_mb = {std::llround(run.config.bucket_mb)};
  if (run.config.memory_limit > 0) {
    std::erase_if(choices.specs, [config = run.config](const std::string& spec) mutable {
      config.compression = CompressionSpec::parse(spec);
      return plan_memory(config).total() > config.memory_limit;
    });
  }
  return {.request = *run.automatic, .choices = choices};
}

void choose_automatically(Resolved& run, const RunOptions& o, const AutoPlan& plan, Communicator* comm,
                          RunOutput& output) {
  const std::string& file = plan.request.plan;
  const auto bucket_mb = o.bucket_mb.empty() ? std::nullopt : std::optional(run.config.bucket_mb);
  if (const auto saved = file.empty() ? std::nullopt : SavedPlan::read(plan.request, run.config, bucket_mb)) {
    run.config.compression = CompressionSpec::parse(saved->compression);
    run.config.bucket_mb = saved->bucket_mb;
    if (comm != nullptr && saved->links) comm->set_link_costs(*saved->links);
    output.predicted = saved->predicted;
    output.choice = saved->choice;
    if (leads(o)) say(fmt::format("Plan of {}: {}", file, plan_flags(run.config)));
    return;
  }
  const auto start = std::chrono::steady_clock::now();
  const RanksReport report = choose_compression(run.config, plan, run.data, comm);
  apply_choice(report, run.config);
  output.predicted = predicted_step(report);
  output.choice = choice_record(report, plan.request, run.config.model);
  if (!leads(o)) return;
  if (!file.empty()) {
    SavedPlan{.compression = run.config.compression.to_string(),
              .bucket_mb = run.config.bucket_mb,
              .links = report.links,
              .predicted = *output.predicted,
              .choice = output.choice}
        .write(file, run.config);
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  say(fmt::format("Measured for --compression {} in {}", plan.request.to_string(),
                  human_seconds(took.count())) +
      links_text(report) + recommendation_text(report, run.config.model));
}

RunSummary run_once(const TrainConfig& config, const DataSplits& data, const RunOutput& output,
                    const RunPart& part) {
  Summarizer summarizer;
  std::unique_ptr<RunLog> log;
  std::vector<RunObserver*> observers;
  if (!output.log.empty()) {
    log = std::make_unique<RunLog>(output.log, config, data, output.choice);
    observers.push_back(log.get());  // first observer, so that the file has each result before stdout
  }
  observers.push_back(&summarizer);
  if (output.observer != nullptr) observers.push_back(output.observer);
  auto start = std::chrono::steady_clock::now();
  {
    Console console(config, {stdout, isatty(STDOUT_FILENO) == 1, output.log_every, output.label});
    observers.push_back(&console);
    Fan fan(observers);
    train_part(config, data, fan, part);
  }
  if (!summarizer.ended()) return {};
  RunSummary summary =
      summarizer.summary(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  if (!summary.predicted) summary.predicted = output.predicted;
  if (log) log->write_summary(summary);
  say(summary_line(summary));
  say(shares_text(summary));
  if (summary.predicted) say(prediction_text(summary));
  say(fmt::format("Memory: {} per rank at most", human_bytes(static_cast<double>(summary.memory_bytes))));
  // Threads of one process share its cores, so no rank is slower than another.
  const std::string straggler = config.processes ? straggler_text(summary) : "";
  if (!straggler.empty()) say(straggler);
  if (!config.trace.empty() && !output_lost(config.trace)) {
    say(fmt::format("Trace of steps {} to {}: {}", config.trace_steps.begin, config.trace_steps.end - 1,
                    config.trace));
  }
  if (!config.gradients_directory.empty()) {
    const std::string path = gradients_path(config.gradients_directory, config.gradients_step);
    if (!output_lost(path)) say(fmt::format("Gradients of step {}: {}", config.gradients_step, path));
  }
  return summary;
}

}  // namespace gradwire
