// Log records: one line of JSON each; docs/formats.md describes every field. A number that is not finite
// becomes null, because JSON has no NaN or infinity.
#pragma once

#include <string>
#include <vector>

#include "trainer/config/config.h"
#include "trainer/data/dataset.h"
#include "trainer/log/observer.h"
#include "trainer/log/summary.h"

namespace gradwire {

constexpr int kRecordSchema = 1;

std::string run_record(const TrainConfig& config, const DataSplits& data, const RunInfo& info);
std::string step_record(const StepRecord& step);
std::string waits_record(const WaitRecord& waits);
std::string shrink_record(const ShrinkRecord& shrink);
std::string grow_record(const GrowRecord& grow);
std::string eval_record(const EvalRecord& eval);
std::string checkpoint_record(const CheckpointRecord& checkpoint);
std::string resume_record(const TrainConfig& config, const RunInfo& info);
std::string summary_record(const RunSummary& summary);
// Returns the resolved config as indented JSON (--dry-run).
std::string config_text(const TrainConfig& config);

// Returns whether `line` is the first record of a log.
bool is_run_record(const std::string& line);
// Returns whether a line of an old log is retained when a run resumes at step `first_step`. False for records
// that the run will write again, and for incomplete lines. `evaluates`: the run starts with an overdue
// evaluation.
bool is_before(const std::string& line, int64_t first_step, bool evaluates);

// Returns the settings that determine the results of a run, as text, from the first line of the run's log.
// Returns "" for any other line.
std::string settings_text(const std::string& run_record);

}  // namespace gradwire
