// The log of a run: one JSON record per line. Each line is flushed, so that a killed run leaves complete
// lines.
#pragma once

#include <string>

#include "runtime/util/file.h"
#include "trainer/log/records.h"

namespace gradwire {

class RunLog final : public RunObserver {
 public:
  // Prepares the log. on_run() opens and locks the file: a run that never starts does not leave a file, and
  // two runs cannot write to the same file. A run that resumes from a checkpoint, or a rank that replaces a
  // lost rank 0, appends to the run's old log, if the file exists. It drops the lines of steps after the
  // checkpoint. If the path is not a regular file, a resumed run starts a new log. A write error does not end
  // the run: the log ends with its last complete line, and lose_output() reports the error. `config` and
  // `data` must outlive the log. `choice`: the record of --compression auto, which follows the first record
  // of a new log; or empty. Throws BadInput when the path cannot be written.
  RunLog(std::string path, const TrainConfig& config, const DataSplits& data, std::string choice = {});

  void on_run(const RunInfo& info) override;
  void on_step(const StepRecord& step) override { write(step_record(step)); }
  void on_waits(const WaitRecord& waits) override { write(waits_record(waits)); }
  void on_shrink(const ShrinkRecord& shrink) override { write(shrink_record(shrink)); }
  void on_grow(const GrowRecord& grow) override { write(grow_record(grow)); }
  void on_replan(const ReplanRecord& replan) override { write(replan.choice); }
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
  const std::string choice_;
  FileDescriptor file_;
};

}  // namespace gradwire
