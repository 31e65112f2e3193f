// The commands, with the console output and the execution of one configuration.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "trainer/cli/flags.h"
#include "trainer/config/config.h"
#include "trainer/log/observer.h"
#include "trainer/log/summary.h"
#include "trainer/train/plan_change.h"

namespace gradwire {

// Prints a line on stdout and flushes it.
void say(const std::string& text);
// Returns whether this process prints. If ranks are processes, only rank 0 prints, except for errors.
bool leads(const RunOptions& options);
void say_start(const Resolved& run, const RunOptions& options);
// Prints the plan for --dry-run.
void say_plan(const TrainConfig& config);

struct RunOutput {
  std::string log = {};             // file name; "" for no log
  int64_t log_every = 0;            // steps between log lines when output is not a terminal; 0: by time
  std::string label = {};           // text before the progress bar on a terminal
  RunObserver* observer = nullptr;  // also receives the records; may be null
  // --compression auto: the record of the choice, for the log, and the prediction.
  std::string choice = {};
  std::optional<PredictedStep> predicted = {};
};
// Calls `train`, with a log and a report on stdout on rank 0. With --elastic, call run_once() on every rank,
// because each rank may have to replace rank 0. Ranks other than rank 0 print nothing.
RunSummary run_once(const TrainConfig& config, const DataSplits& data, const RunOutput& output,
                    const std::function<void(const RunObservers& observers)>& train);

// Returns the message if a signal ends `compare`: what was kept, and the command that continues it. After
// `done` of `all` runs. `logged`: whether the runs have logs next to
// --json, so that another call skips finished runs.
std::string compare_interruption(const RunOptions& options, bool logged, size_t done, size_t all);

// `gradwire compare`: one run per compression, bucket size and seed, then one table. Throws BadInput before
// the first run starts, and the exceptions of a run. Skips runs that an earlier call with the same --json
// finished with the same settings.
void compare(const RunOptions& options);

// `gradwire doctor` reports which features this machine and this build support, and why other features
// are off. With several ranks, also reports the speed of their links and recommends a compression.

// Returns the default options of doctor and plan, which differ from the defaults of train: vit_b_32, batches
// of 32, a timeout of 10 s.
RunOptions doctor_defaults();
// Prints the report on rank 0 and, with options.json, writes it to a file. Collective if a launcher has
// started several processes. Blocks for seconds. Throws CommError when a rank does not answer in time.
void doctor(RunOptions options);

// `gradwire plan` predicts training steps on a cluster that one does not have. Prints the plan and, with
// options.json, writes it to a file. Throws BadInput.
void plan(const RunOptions& options);

// `gradwire top` follows a run through its log. Returns when the run has ended or, without a terminal, after
// one reading. Throws BadInput if the file cannot be read or is not a run log.
void top(const FileOptions& options);

// `gradwire report` and `gradwire export` start the Python programs of trainer/report. Return the exit code
// of the program, which prints its error as one line. Throw BadInput if a file cannot be read or written, and
// Error if Python cannot be started.
int write_report(const FileOptions& options);
int export_logs(const FileOptions& options);

// `gradwire formats` prints every compression spec.
void formats();

// The `gradwire` command: train, compare, doctor, plan, top, report, export, formats.

// Runs the command, and returns the exit code: 0 for success, 1 for a failure while running, 2 for bad input,
// 3 if training ended with a loss that is not finite. Codes 1 and 2 print one line on stderr. `train` without
// flags also prints examples.
int cli_main(int argc, char** argv);

}  // namespace gradwire
