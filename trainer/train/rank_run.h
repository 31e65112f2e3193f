// A rank's run from start to end: one RankTrainer or, with --compression auto, one after another, each with
// the plan that was the best when it began.
#pragma once

#include <memory>
#include <optional>

#include "trainer/train/choose_compression.h"
#include "trainer/train/rank.h"

namespace gradwire {

class RankRun {
 public:
  // Prepares a run. `shared` and `comm` must outlive the object.
  RankRun(const SharedRun& shared, Communicator& comm);
  ~RankRun();
  RankRun(const RankRun&) = delete;

  // Trains to the end of the run or, with --elastic, until the group has grown.
  void run();
  // Adds this rank's spans to the trace file after a failure.
  void keep_trace();

 private:
  void replan();

  TrainConfig config_;  // with the latest plan
  SharedRun shared_;
  Communicator& comm_;
  std::optional<PlanChange> plan_change_;
  std::optional<ReplanRecord> record_;
  int64_t quiet_ = 0;  // steps before the next plan may be questioned
  std::unique_ptr<RankTrainer> trainer_;
};

}  // namespace gradwire
