// The log of a run: one JSON record per line, flushed after each, so that a killed run leaves complete lines.
#pragma once

#include <string>
#include <vector>

#include "runtime/util/file.h"
#include "trainer/log/records.h"

namespace gradwire {

// Throws BadInput if two of these are the same file: the later output would overwrite the earlier.
struct NamedFile {
  const char* flag;
  std::string path;  // empty: not given
};
void check_all_different(const std::vector<NamedFile>& files);

class RunLog final : public RunObserver {
 public:
  // Opens and locks the file in on_run(): a run that never starts does not leave a file, and two runs cannot
  // write to the same file. A run that resumes from a checkpoint appends to its old log, if there is one, and
  // drops the lines of steps after the checkpoint. A rank that replaces a lost rank 0 does the same. If the
  // path is not a regular file, a resumed run starts a new log. A write error does not end the run: the log
  // ends with its last complete line, and lose_output() reports the error. `config` and `data` must outlive
  // the log. Throws BadInput when the path cannot be written.
  RunLog(std::string path, const TrainConfig& config, const DataSplits& data);

  void on_run(const RunInfo& info) override;
  void on_step(const StepRecord& step) override { write(step_record(step)); }
  void on_waits(const WaitRecord& waits) override { write(waits_record(waits)); }
  void on_shrink(const ShrinkRecord& shrink) override { write(shrink_record(shrink)); }
  void on_grow(const GrowRecord& grow) override { write(grow_record(grow)); }
  void on_eval(const EvalRecord& eval) override { write(eval_record(eval)); }
  void on_checkpoint(const CheckpointRecord& checkpoint) override { write(checkpoint_record(checkpoint)); }
  void write_summary(const RunSummary& summary) { write(summary_record(summary)); }

 private:
  void write(const std::string& record);
  FileDescriptor open(const RunInfo& info, bool& continues) const;
  std::string kept_until(const RunInfo& info) const;
  std::string path_;
  const TrainConfig& config_;
  const DataSplits& data_;
  FileDescriptor file_;
};

}  // namespace gradwire
