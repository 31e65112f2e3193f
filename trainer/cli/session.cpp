#include "trainer/cli/session.h"

#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <utility>

#include "collectives/communicator/communicator.h"
#include "runtime/threads/thread.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/parse.h"
#include "runtime/util/signals.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/cli/flags.h"
#include "trainer/cli/launcher.h"
#include "trainer/log/console.h"
#include "trainer/log/observer.h"
#include "trainer/log/records.h"
#include "trainer/measure/peaks.h"
#include "trainer/train/plan_change.h"
#include "trainer/train/run.h"
#include "trainer/train/run_reporter.h"
#include "trainer/train/weight_shards.h"

namespace gradwire {

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

namespace {

// Returns what a run with --compression auto chooses from.
AutoPlan auto_plan(const Resolved& run, const RunOptions& o) {
  Choices choices = run.automatic->choices({});
  // Larger buckets take more memory, so a limit keeps the default.
  if (!o.buckets_mb.empty() || run.config.memory_limit > 0)
    choices.bucket_mb = {std::llround(run.config.bucket_mb)};
  if (run.config.memory_limit > 0) {
    std::erase_if(choices.specs, [config = run.config](const std::string& spec) mutable {
      config.compression = CompressionSpec::parse(spec);
      return plan_memory(config).total() > config.memory_limit;
    });
  }
  return {.request = *run.automatic, .choices = choices};
}

// Measures, chooses the compression, and sets it in run.config; adds the choice to `output`. Prints on rank
// 0. `comm`: null if ranks are threads.
void choose_automatically(Resolved& run, const RunOptions& o, const AutoPlan& plan, Communicator* comm,
                          RunOutput& output) {
  const std::string& file = plan.request.plan;
  const auto bucket_mb = o.buckets_mb.empty() ? std::nullopt : std::optional(run.config.bucket_mb);
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

}  // namespace

RunSummary run_once(const TrainConfig& config, const DataSplits& data, const RunOutput& output,
                    const std::function<void(const RunObservers&)>& train) {
  Summarizer summarizer;
  std::unique_ptr<RunLog> log;
  RunObservers observers;
  if (!output.log.empty()) {
    log = std::make_unique<RunLog>(output.log, config, data, output.choice);
    observers.all.push_back(log.get());  // first observer, so that the file has each result before stdout
  }
  observers.all.push_back(&summarizer);
  if (output.observer != nullptr) observers.all.push_back(output.observer);
  auto start = std::chrono::steady_clock::now();
  {
    Console console(config, stdout, isatty(STDOUT_FILENO) == 1, output.log_every, output.label);
    observers.all.push_back(&console);
    train(observers);
  }
  if (!summarizer.ended()) return {};
  RunSummary summary =
      summarizer.summary(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  if (!summary.predicted) summary.predicted = output.predicted;
  if (log) log->write_summary(summary);
  say(summary_text(summary));
  if (summary.predicted) say(prediction_text(summary));
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

namespace {

// Quotes a word for a shell if necessary.
std::string shell_word(const std::string& word) {
  const char* plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=+:,./@%";
  if (!word.empty() && word.find_first_not_of(plain) == std::string::npos) return word;
  std::string text = "'";
  for (char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

// Returns this process's command line. With a checkpoint folder, as a command that resumes from the folder.
std::string command_line(const std::string& checkpoints = "") {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string text;
  bool skip = false;
  for (std::string word; std::getline(file, word, '\0');) {
    if (std::exchange(skip, false)) continue;
    if (!checkpoints.empty()) {
      skip = word == "--resume" || word == "--init";
      if (skip || word.starts_with("--resume=") || word.starts_with("--init=")) continue;
    }
    text += (text.empty() ? "" : " ") + shell_word(word);
  }
  return checkpoints.empty() ? text : text + " --resume " + shell_word(checkpoints);
}

// Names the newest checkpoint of a `train` run in the message if a signal ends the run.
class TrainInterruption final : public RunObserver {
 public:
  TrainInterruption(const RunOptions& options, const TrainConfig& config)
      : options_(options), config_(config) {
    const bool exist = holds_checkpoints(config.checkpoint_directory);
    set_text(exist ? find_checkpoint(config.checkpoint_directory).path.value_or("") : "");
  }
  ~TrainInterruption() override { set_final_text(""); }
  void on_checkpoint(const CheckpointRecord& record) override { set_text(record.path); }

 private:
  void set_text(const std::string& checkpoint) const {
    std::string kept = checkpoint;
    if (!options_.log.empty()) kept += (kept.empty() ? "" : " and ") + options_.log;
    kept = kept.empty() ? "nothing was kept" : "kept " + kept;
    const bool each = config_.processes && options_.launch;
    if (!checkpoint.empty()) {
      kept += fmt::format("; {}:\n  {}", each ? "start each rank again with" : "continue with",
                          command_line(config_.checkpoint_directory));
    } else if (config_.checkpoint_directory.empty()) {
      kept += "; a run with --checkpoint DIR --resume DIR can be continued";
    } else {
      kept += fmt::format("; there is no checkpoint yet, the first would be after {} steps",
                          config_.checkpoint_every);
    }
    set_final_text(kept);
  }

  const RunOptions& options_;
  const TrainConfig& config_;
};

}  // namespace

std::string compare_interruption(const RunOptions& options, bool logged, size_t done, size_t all) {
  if (!logged) return "nothing was kept; with --json FILE, compare can be continued";
  const std::string kept = fmt::format("kept {} of {} runs next to {}", done, all, options.json);
  const char* repeats = !options.trace.empty() ? "--trace" : options.trace_text ? "--trace-steps" : nullptr;
  if (repeats != nullptr) return fmt::format("{}; with {}, compare repeats all runs", kept, repeats);
  return fmt::format("{}; continue with:\n  {}", kept, command_line());
}

namespace {

constexpr int kDone = 0, kFailed = 1, kBadInput = 2, kDiverged = 3, kNoReader = 128 + SIGPIPE;

// Prints an error as one line.
int report(const char* text, int code) {
  std::string line = text;
  for (char& c : line) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  print_error_line(line);
  return code;
}

// Throws BadInput if the run would overwrite its --log, on every rank that sees the file, so that no rank
// waits for the others. Resumed runs and joiners append to it. Where --resume found no checkpoint, rank 0
// copies the older file, since a command that is repeated until it ends must not fail, and adds a note.
void keep_log(const RunOptions& o, Resolved& run) {
  if (o.log.empty() || !run.config.resume.empty() || !o.join.empty() || o.dry_run || !holds_data(o.log))
    return;
  if (!OutputFile::would_be_regular(o.log)) return;
  if (o.resume.empty()) {
    throw BadInput(
        "--log {}: the file is not empty, and a new run would overwrite it; name another file, or remove "
        "this one",
        o.log);
  }
  if (!leads(o)) return;
  std::string older;
  for (int n = 1; older.empty() || std::filesystem::exists(older); ++n)
    older = fmt::format("{}.{}", o.log, n);
  std::filesystem::copy_file(o.log, older);
  run.notes.push_back(fmt::format("{} was not empty; {} has its contents now", o.log, older));
}

int train(const RunOptions& options) {
  if (leads(options) && !options.log.empty()) OutputFile::would_be_regular(options.log);
  if (leads(options) && !options.trace.empty()) OutputFile::would_be_regular(options.trace);
  if (leads(options) && !options.members.empty())
    OutputFile::would_be_regular(options.members, OutputFile::Kind::private_file);
  Resolved run = resolve(options);
  if (run.automatic && !run.automatic->plan.empty() && leads(options)) {
    OutputFile::would_be_regular(run.automatic->plan);
    check_all_different(
        {{"auto:plan", run.automatic->plan}, {"--log", options.log}, {"--trace", options.trace}});
  }
  keep_log(options, run);
  if (!options.like.empty()) run.notes.push_back("Settings that were not given are those of " + options.like);
  if (leads(options)) say_start(run, options);
  if (options.dry_run) {
    if (leads(options)) say_plan(run.config);
    return kDone;
  }
  check_memory_limit(run.config);
  std::optional<TrainInterruption> interruption;
  if (leads(options) && options.join.empty()) interruption.emplace(options, run.config);
  RunOutput output{.log = options.log,
                   .log_every = options.log_every,
                   .observer = interruption ? &*interruption : nullptr};
  std::unique_ptr<Communicator> comm;
  std::optional<AutoPlan> plan;
  if (!options.join.empty()) {
    say(fmt::format("Joining the run of {}: waiting for its ranks to finish a step", options.join));
  } else {
    comm = join(options, run.config);
    if (run.automatic) plan = auto_plan(run, options);
    if (plan && comm) plan->about_data = described_data(run.data);
    if (plan && !run.chosen) choose_automatically(run, options, *plan, comm.get(), output);
    if (plan) plan->predicted = output.predicted;
  }
  const auto train = [&](const RunObservers& observers) {
    if (options.join.empty())
      return run_training(run.config, run.data, observers, comm.get(), plan ? &*plan : nullptr);
    join_training(run.config, run.data, observers,
                  [&](const std::string& about) { return join_members(options, about); });
  };
  if (leads(options) || run.config.elastic)
    return run_once(run.config, run.data, output, train).diverged() ? kDiverged : kDone;
  train({});
  return kDone;
}

// Detects this process's launcher for train and compare.
void detect_launch(RunOptions& options) {
  options.launch = detect_launcher();
  if (options.launch) share_cores(*options.launch);
  if (!options.join.empty()) options.launch = launch_of_joiner(options.join);
  if (!options.rendezvous.empty() && (!options.launch || options.launch->world == 1)) {
    throw BadInput("--rendezvous " + options.rendezvous +
                   ": there is only one process; start several with torchrun, srun or mpirun, or set RANK "
                   "and WORLD_SIZE for each");
  }
}

int parse_and_run(int argc, char** argv) {
  CLI::App app{
      "Trains vision transformers with compressed gradients, and shows what the compression cost and saved. "
      "Ranks exchange gradients in the format of --compression, such as int8 or powersgd:rank=4, and error "
      "feedback adds what a step loses to the next one; gradwire formats lists every spec.",
      "gradwire"};
  app.set_version_flag("--version", "gradwire " GRADWIRE_VERSION);
  app.require_subcommand(1);
  app.formatter(help_formatter());
  app.footer(
      "gradwire train --data synthetic --steps 100 --ranks 2 --compression int8\n"
      "gradwire compare --ranks 4 --steps 200 --compression fp32 --compression int8\n"
      "gradwire doctor --ranks 4 --link 1Gbit");

  RunOptions options, doctor_options = doctor_defaults(), plan_options = doctor_defaults();
  CLI::App* train_command = app.add_subcommand("train", "Train a model");
  train_command->footer(
      "gradwire train --model vit_tiny --data fashion-mnist --ranks 4 --compression powersgd:rank=4\n"
      "gradwire train --data synthetic --steps 100 --ranks 2 --compression int8 --log run.jsonl\n"
      "gradwire train --checkpoint run --resume run");
  add_run_flags(*train_command, Setting::kTrain, options);
  CLI::App* compare_command = app.add_subcommand(
      "compare", "Train once per --compression and seed, everything else the same, and print one table");
  compare_command->footer(
      "gradwire compare --ranks 4 --steps 200 --compression fp32 --compression int8\n"
      "gradwire compare --ranks 4 --link 1Gbit --compression shelf --json result.json\n"
      "gradwire compare --ranks 4 --seeds 3 --compression fp32 --compression powersgd:rank=4 "
      "--target-accuracy 84");
  add_run_flags(*compare_command, Setting::kCompare, options);
  CLI::App* doctor_command = app.add_subcommand("doctor",
                                                "Show devices, versions, and disabled features with the "
                                                "reason; with several ranks, measure their links and "
                                                "recommend a compression for --model");
  doctor_command->footer(
      "gradwire doctor\n"
      "gradwire doctor --ranks 4 --link 1Gbit,1ms --model vit_b_16\n"
      "torchrun --nnodes 2 --nproc-per-node 8 --no-python gradwire doctor --json doctor.json");
  add_run_flags(*doctor_command, Setting::kDoctor, doctor_options);
  CLI::App* plan_command = app.add_subcommand(
      "plan", "Predict training steps on a cluster from its description, for each compression and schedule");
  plan_command->footer(
      "gradwire plan --cluster h100-ib --ranks 64\n"
      "gradwire plan --cluster l40s-ethernet --ranks 16 --model vit_l_16 --compression int8 --compression "
      "powersgd:rank=4\n"
      "gradwire plan --cluster my-cluster.json --ranks 32 --bucket-mb 25 --bucket-mb 100 --json plan.json");
  add_run_flags(*plan_command, Setting::kPlan, plan_options);
  FileOptions file_options;
  add_file_commands(app, file_options);
  check_paths(app);

  // CLI11 takes the words in reverse order.
  std::vector<std::string> words(std::reverse_iterator(argv + argc), std::reverse_iterator(argv + 1));
  if (!words.empty() && words.back() == "help") {
    words.pop_back();
    words.insert(words.begin(), "--help");
  } else if (words == std::vector<std::string>{"version"}) {
    words = {"--version"};
  }
  if (words.empty()) std::fputs(app.help().c_str(), stdout);
  check_command(app, words.empty() ? "-" : words.back());
  // A train without flags is probably a question, and training takes minutes. A script whose flags got lost
  // must not look like success.
  if (words == std::vector<std::string>{"train"}) {
    report("train needs a flag, such as --model; gradwire train --help lists all", kBadInput);
    fmt::print(stderr, "Examples:\n  {}\n",
               CLI::detail::find_and_replace(train_command->get_footer(), "\n", "\n  "));
    return kBadInput;
  }
  try {
    app.parse(std::vector(words));
    if (!options.like.empty()) {
      const auto launch = detect_launcher();
      std::vector<std::string> like = flags_like(options.like, *train_command, launch && launch->world > 1);
      words.insert(words.begin(), like.begin(), like.end());
      app.parse(std::move(words));
    }
    options.flags = repeatable_flags(train_command->parsed() ? *train_command : *compare_command);
  } catch (const CLI::Success& success) {
    return app.exit(success);  // --help, --version
  } catch (const CLI::ParseError& error) {
    return report(parse_error_text(app, error).c_str(), kBadInput);
  }
  if (app.got_subcommand("report")) return write_report(file_options);
  if (app.got_subcommand("export")) return export_logs(file_options);
  if (plan_command->parsed()) {
    plan(plan_options);
  } else if (app.got_subcommand("top")) {
    top(file_options);
  } else if (app.got_subcommand("formats")) {
    formats();
  } else if (doctor_command->parsed()) {
    doctor(doctor_options);
  } else {
    detect_launch(options);
    if (train_command->parsed()) return train(options);
    compare(options);
  }
  return kDone;
}

}  // namespace

int cli_main(int argc, char** argv) {
  prepare_standard_descriptors();
  prepare_signals();
  try {
    const int done = parse_and_run(argc, argv);
    const int code = done != kBadInput && any_output_lost() ? kFailed : done;
    // Flushing stdout detects a full disk at the latest. Incomplete output must not look like success.
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
    if (reader_is_gone()) return code == kDone ? kNoReader : code;  // | head
    return report("standard output could not be written: is its disk full? All other work is done", kFailed);
  } catch (const BadInput& error) {
    return report(error.what(), kBadInput);
  } catch (const std::exception& error) {
    return report(text_of(error).c_str(), kFailed);
  }
}

}  // namespace gradwire
