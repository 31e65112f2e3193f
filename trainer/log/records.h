// Records as JSON text, one line each; docs/formats.md describes every field. A number that is not finite
// becomes null, so that each line stays valid JSON whatever the run did.
#pragma once

#include <string>
#include <vector>

#include "trainer/config/config.h"
#include "trainer/config/run.h"
#include "trainer/data/dataset.h"
#include "trainer/log/summary.h"

namespace gradwire {

constexpr int kRecordSchema = 1;

std::string run_record(const TrainConfig& config, const DataSplits& data, const RunInfo& info);
std::string step_record(const StepRecord& step);
std::string eval_record(const EvalRecord& eval);
std::string checkpoint_record(const CheckpointRecord& checkpoint);
std::string resume_record(const TrainConfig& config, const RunInfo& info);
std::string summary_record(const RunSummary& summary);
// The resolved config alone, indented, for people (--dry-run).
std::string config_text(const TrainConfig& config);

// Is this the first line of a log?
bool is_run_record(const std::string& line);
// Of a line of a log that a run goes on with, which is at step `first_step` of `steps`: does it stay? What
// the run will say again does not, nor does a part of a line.
bool is_before(const std::string& line, int64_t first_step, int64_t steps);

struct ComparedRun {
  std::string compression;
  RunSummary summary;
  int ranks = 1;
  std::string device;  // "host" or "cuda"
  double bucket_mb = 0;
};
// The array that `gradwire compare --json` writes.
std::string compare_document(const std::vector<ComparedRun>& runs);

}  // namespace gradwire
