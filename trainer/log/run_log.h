// The run's log: one JSON record per line, each flushed when written: a killed run leaves complete lines.
#pragma once

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "trainer/log/records.h"

namespace gradwire {

// Throws BadInput if `path` cannot be created or overwritten. Creates nothing.
void check_writable(const std::string& path);

// Throws BadInput if two of these are the same file: the one written last would destroy the other.
struct NamedFile {
  const char* flag;
  std::string path;  // empty: not given
};
void check_all_different(const std::vector<NamedFile>& files);

// Replaces the file at `path` atomically: a reader sees the old contents or the new.
void write_file_atomically(const std::string& path, const std::string& contents);

class RunLog final : public RunObserver {
 public:
  // The file is opened in on_run(): a run that never starts leaves no file. A run that resumes from a
  // checkpoint appends to its old log, if there is one, and drops the lines of steps after the checkpoint. So does a
  // rank that takes a run over.
  // `config` and `data` must outlive the log. Throws BadInput when the path cannot be written.
  RunLog(std::string path, const TrainConfig& config, const DataSplits& data);

  void on_run(const RunInfo& info) override;
  void on_step(const StepRecord& step) override;
  void on_waits(const WaitRecord& waits) override;
  void on_shrink(const ShrinkRecord& shrink) override;
  void on_grow(const GrowRecord& grow) override;
  void on_eval(const EvalRecord& eval) override;
  void on_checkpoint(const CheckpointRecord& checkpoint) override;
  void write_summary(const RunSummary& summary);

 private:
  void write(const std::string& record);
  bool keep_until(const RunInfo& info);
  std::string path_;
  const TrainConfig& config_;
  const DataSplits& data_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_{nullptr, std::fclose};
};

}  // namespace gradwire
