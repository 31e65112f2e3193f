// Messages of runs that Ctrl-C or SIGTERM ends: what was kept, and the command that continues the run.
#pragma once

#include <string>

#include "trainer/cli/options.h"
#include "trainer/log/observer.h"

namespace gradwire {

// While an object exists, SIGINT and SIGTERM print its text on stderr before they end the process. The exit
// status stays the signal's, so that shells and schedulers see why the process ended. Signals that the caller
// ignores stay ignored. At most one object may exist.
class Interruption {
 public:
  explicit Interruption(const std::string& text);
  ~Interruption();
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;
  // Replaces the text. Thread-safe.
  void set(const std::string& text);
};

// Names the newest checkpoint of a `train` run in the text of its interruption.
class TrainInterruption final : public RunObserver {
 public:
  TrainInterruption(const RunOptions& options, const TrainConfig& config);
  void on_checkpoint(const CheckpointRecord& record) override;

 private:
  std::string text(const std::string& checkpoint) const;
  const RunOptions& options_;
  const TrainConfig& config_;
  Interruption interruption_;
};

// Returns the text for `compare` after `done` of `all` runs. `logged`: whether the runs have logs next to
// --json, so that another call skips finished runs.
std::string compare_interruption(const RunOptions& options, bool logged, size_t done, size_t all);

}  // namespace gradwire
