#include "trainer/cli/cli.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <new>

#include "collectives/communicator/communicator.h"
#include "runtime/environment.h"
#include "runtime/error.h"
#include "trainer/checkpoint/gradients.h"
#include "trainer/cli/doctor.h"
#include "trainer/cli/flags.h"
#include "trainer/cli/launcher.h"
#include "trainer/cli/options.h"
#include "trainer/config/run.h"
#include "trainer/log/console.h"
#include "trainer/log/run_log.h"
#include "trainer/log/summary.h"
#include "trainer/measure/products.h"
#include "trainer/train/memory.h"

namespace gradwire {
namespace {

constexpr int kDone = 0, kFailed = 1, kBadInput = 2;

// One line, whatever the text was made of.
int report(const char* text, int code) {
  std::string line = text;
  for (char& c : line) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  std::fflush(stdout);
  std::fprintf(stderr, "gradwire: %s\n", line.c_str());
  return code;
}

void say(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

// Of ranks that are processes only rank 0 speaks, but for errors.
bool leads(const Options& o) {
  return !o.launch || o.launch->rank == 0;
}

void say_start(const Resolved& run, const Options& o) {
  say(run.device_line);
  if (run.config.devices.front().is_host()) say("Products: " + host_products_text());
  if (o.launch) {
    std::string meeting = o.rendezvous.empty() ? o.launch->rendezvous : o.rendezvous;
    say("Launcher: " + o.launch->launcher + (o.launch->world == 1 ? " with one process" : "") + " (" +
        o.launch->variables + ")" +
        (o.launch->world > 1 && !meeting.empty() ? ", meeting at " + meeting : ""));
  }
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

// Hands each record to several observers, in order.
class Fan final : public RunObserver {
 public:
  explicit Fan(std::vector<RunObserver*> observers) : observers_(std::move(observers)) {}
  void on_run(const RunInfo& info) override {
    for (auto* observer : observers_) observer->on_run(info);
  }
  void on_step(const StepRecord& step) override {
    for (auto* observer : observers_) observer->on_step(step);
  }
  void on_eval(const EvalRecord& eval) override {
    for (auto* observer : observers_) observer->on_eval(eval);
  }
  void on_checkpoint(const CheckpointRecord& checkpoint) override {
    for (auto* observer : observers_) observer->on_checkpoint(checkpoint);
  }

 private:
  std::vector<RunObserver*> observers_;
};

// With a communicator each process is a rank.
void train_rank(const TrainConfig& config, const DataSplits& data, RunObserver& observer,
                Communicator* comm) {
  if (comm == nullptr) {
    run_training(config, data, observer);
  } else {
    run_training(config, data, observer, *comm);
  }
}

RunSummary run_once(const Resolved& run, const TrainConfig& config, const std::string& log_path,
                    int64_t log_every, Communicator* comm) {
  Summarizer summarizer;
  std::unique_ptr<RunLog> log;
  std::vector<RunObserver*> observers;
  if (!log_path.empty()) {
    log = std::make_unique<RunLog>(log_path, config, run.data);
    observers.push_back(log.get());  // first: what a person sees is already safe in the file
  }
  observers.push_back(&summarizer);
  auto start = std::chrono::steady_clock::now();
  {
    Console console(config, {stdout, isatty(STDOUT_FILENO) == 1, log_every});
    observers.push_back(&console);
    Fan fan(observers);
    train_rank(config, run.data, fan, comm);
  }
  RunSummary summary =
      summarizer.summary(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  if (log) log->write_summary(summary);
  say(summary_line(summary));
  say(shares_text(summary));
  if (!config.trace.empty()) {
    say(fmt::format("Trace of steps {} to {}: {}", config.trace_steps.begin, config.trace_steps.end - 1,
                    config.trace));
  }
  if (!config.gradients_directory.empty()) {
    say(fmt::format("Gradients of step {}: {}", config.gradients_step,
                    gradients_path(config.gradients_directory, config.gradients_step)));
  }
  return summary;
}

int train(const Options& options) {
  if (leads(options) && !options.log.empty()) check_writable(options.log);
  if (leads(options) && !options.trace.empty()) check_writable(options.trace);
  Resolved run = resolve(options);
  if (leads(options)) say_start(run, options);
  if (options.dry_run) {
    if (leads(options)) say_plan(run.config);
    return kDone;
  }
  std::unique_ptr<Communicator> comm = join(options, run.config);
  if (leads(options)) {
    run_once(run, run.config, options.log, options.log_every, comm.get());
  } else {
    RunObserver nobody;
    train_rank(run.config, run.data, nobody, comm.get());
  }
  return kDone;
}

// demo/compare.json -> demo/compare.2.jsonl
std::string path_of_run(const std::string& path, size_t index, const std::string& extension) {
  std::filesystem::path named = path;
  named.replace_extension(fmt::format("{}{}", index, extension));
  return named.string();
}
std::string run_log_path(const std::string& json_path, size_t index) {
  return path_of_run(json_path, index, ".jsonl");
}

// Run `index` of a comparison: each compression with each bucket size.
TrainConfig compared_config(const Resolved& run, size_t index) {
  TrainConfig config = run.config;
  config.compression = run.compressions[index / run.buckets_mb.size()];
  config.bucket_mb = run.buckets_mb[index % run.buckets_mb.size()];
  if (!config.trace.empty()) config.trace = path_of_run(config.trace, index, ".json");
  return config;
}

int compare(const Options& options) {
  Resolved run = resolve(options);
  const size_t count = run.compressions.size() * run.buckets_mb.size();
  if (!leads(options)) {
    if (options.dry_run) return kDone;
    std::unique_ptr<Communicator> comm = join(options, run.config);
    RunObserver nobody;
    for (size_t i = 0; i < count; ++i) {
      train_rank(compared_config(run, i), run.data, nobody, comm.get());
    }
    return kDone;
  }
  if (!options.json.empty()) {
    check_writable(options.json);
    for (size_t i = 0; i < count; ++i) check_writable(run_log_path(options.json, i));
  }
  for (size_t i = 0; i < count && !options.trace.empty(); ++i) {
    check_writable(compared_config(run, i).trace);
  }
  say_start(run, options);
  if (options.dry_run) {
    for (size_t i = 0; i < count; ++i) say_plan(compared_config(run, i));
    return kDone;
  }
  std::unique_ptr<Communicator> comm = join(options, run.config);
  std::vector<ComparedRun> runs;
  for (size_t i = 0; i < count; ++i) {
    const TrainConfig config = compared_config(run, i);
    say(fmt::format("\n[{}/{}] {}{}", i + 1, count, config.compression.to_string(),
                    run.buckets_mb.size() > 1 ? fmt::format(", buckets of {:g} MiB", config.bucket_mb) : ""));
    std::string log_path = options.json.empty() ? "" : run_log_path(options.json, i);
    RunSummary summary = run_once(run, config, log_path, options.log_every, comm.get());
    runs.push_back({config.compression.to_string(), summary, config.ranks(),
                    config.devices[0].is_host() ? "host" : "cuda", config.bucket_mb});
  }
  if (!options.json.empty()) write_file_atomically(options.json, compare_document(runs));
  say(fmt::format("\n{} on {}, {}{}, {} steps; steps and bytes are medians, bytes per rank\n",
                  run.config.model.name, run.config.data.to_string(), run.config.ranks(),
                  run.config.ranks() == 1 ? " rank" : " ranks", run.config.steps));
  say(compare_table(runs));
  return kDone;
}

int parse_and_run(int argc, char** argv) {
  CLI::App app{
      "Trains vision transformers with compressed gradients, and shows what the compression cost and saved.",
      "gradwire"};
  app.set_version_flag("--version", "gradwire " GRADWIRE_VERSION);
  app.require_subcommand(1);

  Options options, doctor_options = doctor_defaults();
  bool show_environment = false;
  CLI::App* train_command = app.add_subcommand("train", "Train a model");
  add_train_flags(*train_command, options);
  CLI::App* compare_command = app.add_subcommand(
      "compare", "Train once per --compression, everything else the same, and print one table");
  add_compare_flags(*compare_command, options);
  CLI::App* doctor_command =
      app.add_subcommand("doctor",
                         "Show devices, versions, and what is off and why; with several ranks measure their "
                         "links, and say which compression would pay for --model");
  add_doctor_flags(*doctor_command, doctor_options, show_environment);

  std::string first = argc > 1 ? argv[1] : "";
  if (!first.empty() && first[0] != '-' && first != "train" && first != "compare" && first != "doctor") {
    throw BadInput("unknown command '" + first + "'; there are train, compare and doctor");
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {
    return app.exit(success);  // --help, --version
  } catch (const CLI::ParseError& error) {
    return report((std::string(error.what()) + "; see gradwire --help").c_str(), kBadInput);
  }
  if (doctor_command->parsed()) {
    if (show_environment) {
      std::fputs(environment_text().c_str(), stdout);
      return kDone;
    }
    doctor(doctor_options);
    return kDone;
  }
  options.launch = detect_launcher();
  if (!options.rendezvous.empty() && (!options.launch || options.launch->world == 1)) {
    throw BadInput(
        "--rendezvous " + options.rendezvous +
        ": nothing says that there are several processes; start them with torchrun, srun or mpirun, "
        "or set RANK and WORLD_SIZE for each");
  }
  if (options.launch) share_cores(*options.launch);
  return compare_command->parsed() ? compare(options) : train(options);
}

}  // namespace

int cli_main(int argc, char** argv) {
  try {
    return parse_and_run(argc, argv);
  } catch (const BadInput& error) {
    return report(error.what(), kBadInput);
  } catch (const std::bad_alloc&) {
    return report("out of host memory", kFailed);
  } catch (const std::exception& error) {
    return report(error.what(), kFailed);
  }
}

}  // namespace gradwire
