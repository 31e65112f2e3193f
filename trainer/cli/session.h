// Console output and the execution of one configuration, for `train` and `compare`.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "trainer/cli/options.h"
#include "trainer/config/config.h"
#include "trainer/log/observer.h"
#include "trainer/log/summary.h"
#include "trainer/train/choose_compression.h"

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

}  // namespace gradwire
