// --elastic: a run of processes that goes on without those that die.
//
//   a step breaks     every survivor's part of the group fails (transport.h), and its RankTrainer goes
//   regroup()         the survivors find each other and form a group (rendezvous/reunion.h), with or without rank 0
//   agree()           they compare which steps each has finished, and choose the newest that all have
//   a new RankTrainer takes that step's state, of which each rank keeps its own (kept_steps.h), and does the step again
//
// So a step is applied by all survivors or by none: who has applied it before the others drops the result. Weights,
// moments and factors are the same on all ranks after a step that all have finished, so nothing is sent. Residuals are
// each rank's own; those of the lost ranks are gone, and the ShrinkRecord says how large they were.
//
// A rank that fails by itself (its disk is full) is lost to the others like one that is killed. What fails before the
// first step ends the run.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "trainer/config/run.h"
#include "trainer/train/kept_steps.h"

namespace gradwire {

class Elastic {
 public:
  // This process's part of a run that begins with `comm`, which must be shrinkable and outlive the object.
  Elastic(const TrainConfig& config, Communicator& comm);

  // The group, and the run's settings for it. Both change in regroup().
  Communicator& comm() { return group_ ? *group_ : first_; }
  const TrainConfig& config() const { return config_; }

  // ---- For the run's loop: once the group has failed and its RankTrainer is gone.

  // Whether there is a step to go back to.
  bool has_begun() const { return kept_.newest().has_value(); }
  // Collective over the survivors. Throws CommError when they do not find each other, this rank was left out, or it
  // cannot be known that no others go on; Error when fewer are left than --elastic allows. Both say what to do.
  void regroup(const std::string& why);
  // Collective over a new group; does nothing in the first. False: there is nothing left to do, rank 0 has reported the
  // run's end. Throws Error when the same step breaks again although no rank is lost, CommError like any collective.
  bool agree();

  // ---- For the RankTrainer.

  struct Start {
    Position position;                            // steps done, and where that is in the data
    bool evaluation = false, checkpoint = false;  // due after these steps, and not done
  };
  // None in the first group.
  const std::optional<Start>& start() const { return start_; }
  bool restore(const RankState& rank) const { return kept_.restore(rank, start_->position.step); }
  // This process is rank 0 since the one before it is lost, and has not reported anything yet.
  bool takes_over() { return start_ && comm().rank() == 0 && !announced_; }
  void announced() { announced_ = true; }
  // The group is ready to do the step again; ranks that are lost from here on belong to the next record.
  ShrinkRecord resumed();
  // Enqueues on the rank's stream, after a step or before the first one: see KeptSteps.
  void keep(const RankState& rank, const Position& position, KeptSteps::Due due);
  // Rank 0 has reported the evaluation after this step, or the end.
  void evaluated(int64_t step) { evaluated_ = step; }
  void finished() { finished_ = true; }

 private:
  TrainConfig config_for(int world) const;
  std::string remedy() const;

  const TrainConfig launched_;  // the settings, with all ranks
  TrainConfig config_;
  Communicator& first_;
  std::unique_ptr<Communicator> group_;  // none before the first regroup()
  std::vector<int> ranks_;               // of the group, as launched
  KeptSteps kept_;
  std::optional<Start> start_;
  bool announced_ = false, finished_ = false;
  int64_t evaluated_ = -1;
  // For the next record.
  std::vector<int> lost_;
  std::string why_;
  std::optional<std::chrono::steady_clock::time_point> failed_at_;
  bool lost_any_ = false;  // in the latest regroup()
  int fruitless_ = 0;      // how often the group has formed again without losing a rank or doing a step
};

}  // namespace gradwire
