#include "trainer/cli/cli.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <cstdio>
#include <exception>

#include "collectives/communicator/communicator.h"
#include "runtime/threads/thread.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/signals.h"
#include "runtime/util/parse.h"
#include "trainer/cli/compare.h"
#include "trainer/cli/doctor.h"
#include "trainer/cli/flags.h"
#include "trainer/cli/interruption.h"
#include "trainer/cli/launcher.h"
#include "trainer/cli/options.h"
#include "trainer/cli/parse_error.h"
#include "trainer/cli/plan.h"
#include "trainer/cli/report.h"
#include "trainer/cli/session.h"
#include "trainer/cli/top.h"
#include "trainer/cli/values.h"
#include "trainer/log/observer.h"
#include "trainer/log/run_log.h"
#include "trainer/train/agreement.h"
#include "trainer/train/memory_plan.h"

namespace gradwire {
namespace {

constexpr int kDone = 0, kFailed = 1, kBadInput = 2, kDiverged = 3;

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

int train(const RunOptions& options) {
  if (leads(options) && !options.log.empty()) check_writable(options.log);
  if (leads(options) && !options.trace.empty()) check_writable(options.trace);
  if (leads(options) && !options.members.empty())
    check_writable(options.members, OutputFile::Kind::private_file);
  Resolved run = resolve(options);
  if (run.automatic && !run.automatic->plan.empty() && leads(options)) {
    check_writable(run.automatic->plan);
    check_all_different(
        {{"auto:plan", run.automatic->plan}, {"--log", options.log}, {"--trace", options.trace}});
  }
  if (leads(options)) say_start(run, options);
  if (options.dry_run) {
    if (leads(options)) say_plan(run.config);
    return kDone;
  }
  check_memory_limit(run.config);
  std::unique_ptr<TrainInterruption> interruption;
  if (leads(options) && options.join.empty()) {
    interruption = std::make_unique<TrainInterruption>(options, run.config);
  }
  RunOutput output{.log = options.log, .log_every = options.log_every, .observer = interruption.get()};
  if (!options.join.empty()) {
    say(fmt::format("Joining the run of {}: waiting for its ranks to finish a step", options.join));
    const RunPart part{.join_group = [&](const std::string& about) {
      return join_members(options.join, about, join_options(options));
    }};
    return run_once(run.config, run.data, output, part).diverged() ? kDiverged : kDone;
  }
  std::unique_ptr<Communicator> comm = join(options, run.config);
  std::optional<AutoPlan> plan;
  if (run.automatic) plan = auto_plan(run, options);
  if (plan && comm) plan->about_data = described_data(run.data);
  if (plan && !run.chosen) choose_automatically(run, options, *plan, comm.get(), output);
  if (plan) plan->predicted = output.predicted;
  const RunPart part{.comm = comm.get(), .plan = plan ? &*plan : nullptr};
  if (leads(options) || run.config.elastic)
    return run_once(run.config, run.data, output, part).diverged() ? kDiverged : kDone;
  RunObserver silent;
  train_part(run.config, run.data, silent, part);
  return kDone;
}

void run_doctor(const RunOptions& options, bool show_environment) {
  if (show_environment) {
    std::fputs(environment_text().c_str(), stdout);
  } else {
    doctor(options);
  }
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

// The options of commands that only read files.
struct FileCommands {
  PlanOptions plan;
  TopOptions top;
  ReportOptions report;
  ExportOptions events;
};

void add_file_commands(CLI::App& app, FileCommands& o) {
  CLI::App* plan_command = app.add_subcommand(
      "plan", "Predict training steps on a cluster from its description, for each compression and schedule");
  add_plan_flags(*plan_command, o.plan);
  CLI::App* top_command = app.add_subcommand(
      "top", "Follow a run by its log (train --log): progress, and which rank is the straggler");
  add_top_flags(*top_command, o.top);
  CLI::App* report_command = app.add_subcommand(
      "report", "Write one page, for a browser, about comparisons, run logs and results of gradwire-bench");
  add_report_flags(*report_command, o.report);
  CLI::App* export_command =
      app.add_subcommand("export", "Convert run logs for another program (--tensorboard)");
  add_export_flags(*export_command, o.events);
}

// A train without flags is probably a question, and training takes minutes. A script whose flags got lost
// must not look like success.
int explain_train(const CLI::App& command) {
  report("train needs a flag, such as --model; gradwire train --help lists all", kBadInput);
  std::fprintf(stderr, "%s\n", command.get_footer().c_str());
  return kBadInput;
}

int parse_and_run(int argc, char** argv) {
  CLI::App app{
      "Trains vision transformers with compressed gradients, and shows what the compression cost and saved.",
      "gradwire"};
  app.set_version_flag("--version", "gradwire " GRADWIRE_VERSION);
  app.require_subcommand(1);

  RunOptions options, doctor_options = doctor_defaults();
  bool show_environment = false;
  CLI::App* train_command = app.add_subcommand("train", "Train a model");
  add_train_flags(*train_command, options);
  CLI::App* compare_command = app.add_subcommand(
      "compare", "Train once per --compression and seed, everything else the same, and print one table");
  add_compare_flags(*compare_command, options);
  CLI::App* doctor_command = app.add_subcommand("doctor",
                                                "Show devices, versions, and disabled features with the "
                                                "reason; with several ranks, measure their links and "
                                                "recommend a compression for --model");
  add_doctor_flags(*doctor_command, doctor_options, show_environment);
  FileCommands file_commands;
  add_file_commands(app, file_commands);
  check_paths(app);

  const std::string first = argc > 1 ? argv[1] : "";
  const auto named = app.get_subcommands([&](CLI::App* command) { return command->get_name() == first; });
  if (!first.empty() && first[0] != '-' && named.empty()) {
    throw BadInput("unknown command '" + first +
                   "'; use train, compare, doctor, plan, top, report or export");
  }
  if (argc == 2 && first == "train") return explain_train(*train_command);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {
    return app.exit(success);  // --help, --version
  } catch (const CLI::ParseError& error) {
    return report(parse_error_text(app, error).c_str(), kBadInput);
  }
  if (app.got_subcommand("report")) return write_report(file_commands.report);
  if (app.got_subcommand("export")) return export_events(file_commands.events);
  if (app.got_subcommand("plan")) {
    plan(file_commands.plan);
  } else if (app.got_subcommand("top")) {
    top(file_commands.top);
  } else if (doctor_command->parsed()) {
    run_doctor(doctor_options, show_environment);
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
    return report(
        "standard output could not be written: its disk is full, or its reader is gone; all other work is "
        "done",
        kFailed);
  } catch (const BadInput& error) {
    return report(error.what(), kBadInput);
  } catch (const std::exception& error) {
    return report(text_of(error).c_str(), kFailed);
  }
}

}  // namespace gradwire
