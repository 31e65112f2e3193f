// What `train` and `compare` share: what they tell, and one run from its first record to its summary.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "trainer/cli/options.h"
#include "trainer/config/run.h"
#include "trainer/log/summary.h"

namespace gradwire {

// A line on stdout, flushed.
void say(const std::string& text);
// Of ranks that are processes only rank 0 speaks, but for errors.
bool leads(const Options& options);
void say_start(const Resolved& run, const Options& options);
// For --dry-run.
void say_plan(const TrainConfig& config);

// This process's part in a run: all of it, a rank that was launched, or one that joins.
struct Part {
  Communicator* comm = nullptr;
  std::function<std::unique_ptr<Communicator>(const std::string& about)> knock = {};  // of a run that goes on
};
void train_part(const TrainConfig& config, const DataSplits& data, RunObserver& observer, const Part& part);

struct RunOutput {
  std::string log = {};    // file; "": none
  int64_t log_every = 1;   // off a terminal: steps per line
  std::string label = {};  // on a terminal, before the progress bar
};
// Trains, as rank 0, with a log and a report on stdout. With --elastic on every rank, as each may have to take rank 0's
// place; those that don't are silent.
RunSummary run_once(const TrainConfig& config, const DataSplits& data, const RunOutput& output,
                    const Part& part);

}  // namespace gradwire
