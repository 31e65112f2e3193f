// Console output and the execution of one configuration, for `train` and `compare`.
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

// This process's part of a run: the whole run, one launched rank, or a joiner.
struct RunPart {
  Communicator* comm = nullptr;
  const AutoPlan* plan = nullptr;  // --compression auto: the run may choose again
  // Set for a joiner: joins a running job.
  std::function<std::unique_ptr<Communicator>(const std::string& about)> join_group = {};
};
void train_part(const TrainConfig& config, const DataSplits& data, RunObserver& observer,
                const RunPart& part);

struct RunOutput {
  std::string log = {};             // file name; "" for no log
  int64_t log_every = 1;            // steps between log lines when output is not a terminal
  std::string label = {};           // text before the progress bar on a terminal
  RunObserver* observer = nullptr;  // also receives the records; may be null
  // --compression auto: the record of the choice, for the log, and the prediction.
  std::string choice = {};
  std::optional<PredictedStep> predicted = {};
};
// Returns what a run with --compression auto chooses from.
AutoPlan auto_plan(const Resolved& run, const RunOptions& options);
// Measures, chooses the compression, and sets it in run.config; adds the choice to `output`. Prints on rank
// 0. `comm`: null if ranks are threads.
void choose_automatically(Resolved& run, const RunOptions& options, const AutoPlan& plan, Communicator* comm,
                          RunOutput& output);
// Trains, with a log and a report on stdout on rank 0. With --elastic, call run_once() on every rank, because
// each rank may have to replace rank 0. Ranks other than rank 0 print nothing.
RunSummary run_once(const TrainConfig& config, const DataSplits& data, const RunOutput& output,
                    const RunPart& part);

// Messages of runs that a signal ends: what was kept, and the command that continues the run.

// Names the newest checkpoint of a `train` run in the text of its interruption.
class TrainInterruption final : public RunObserver {
 public:
  TrainInterruption(const RunOptions& options, const TrainConfig& config);
  ~TrainInterruption() override;
  void on_checkpoint(const CheckpointRecord& record) override;

 private:
  std::string text(const std::string& checkpoint) const;
  const RunOptions& options_;
  const TrainConfig& config_;
};

// Returns the text for `compare` after `done` of `all` runs. `logged`: whether the runs have logs next to
// --json, so that another call skips finished runs.
std::string compare_interruption(const RunOptions& options, bool logged, size_t done, size_t all);

// The `gradwire` command: train, compare, doctor, plan, top, report, export.

// Runs the command, and returns the exit code: 0 for success, 1 for a failure while running, 2 for bad input,
// 3 if training ended with a loss that is not finite. Codes 1 and 2 print one line on stderr. `train` without
// flags also prints examples.
int cli_main(int argc, char** argv);

}  // namespace gradwire
