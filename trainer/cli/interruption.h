// Messages of runs that a signal ends: what was kept, and the command that continues the run.
#pragma once

#include <string>

#include "trainer/cli/options.h"
#include "trainer/log/observer.h"

namespace gradwire {

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

}  // namespace gradwire
