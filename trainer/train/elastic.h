// --elastic: a run of processes that continues when ranks die, and admits new ranks.
//
//   a step breaks     every survivor's operations fail (transport.h), and its RankTrainer is destroyed
//   regroup()         the survivors form a new group (net/quorum.h), with or without rank 0
//   agree()           they compare their finished steps, and choose the newest step that all have finished
//   new RankTrainers  each restores its snapshot of this step (snapshots.h) and repeats the next step
//
// So either all survivors apply a step or no survivor does: a rank that has already applied the step drops
// the result. Weights, moments and factors are equal on all ranks after a step that all ranks have finished,
// so the ranks send no state. Residuals differ from rank to rank. The residuals of dead ranks are lost; the
// GroupRecord reports their norms.
//
//   a joiner          sends a request (net/membership.h) and waits. The exchange after each step
//                     notifies all ranks
//   grow()            after the next step the ranks form a group with the joiners, and destroy their
//                     RankTrainers
//   agree()           as above; joiners have no state, and get unused numbers
//   new RankTrainers  each continues from its state. Joiners receive the state from the other ranks
//                     (snapshots.h), except residuals, which start at 0
//
// A joiner without state is expendable: on any failure it leaves and retries.
//
// With --shard no other rank holds a lost rank's part of the state. Survivors and joiners therefore start
// from the newest checkpoint, which also holds the residuals of lost ranks. The run saves a checkpoint before
// it admits joiners.
//
// The other ranks treat a rank that fails alone, for example because its disk is full, like a killed rank. A
// failure before the first step ends the run.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "trainer/config/config.h"
#include "trainer/log/observer.h"
#include "trainer/train/snapshots.h"

namespace gradwire {

// The state that each rank of a new group sends to the other ranks. The struct has no padding, because ranks
// send its bytes.
struct ElasticState {
  int64_t reached = -1;     // steps done, as far as this process knows; -1: no state
  int64_t evaluated = -1;   // step of the latest evaluation that rank 0 has reported
  int64_t finished = 0;     // 1: rank 0 has reported the end of the run
  int64_t number = -1;      // launch or join number; -1: unknown
  int64_t next_number = 0;  // number of the next joiner
};
static_assert(sizeof(ElasticState) == 40);

// The state that a process keeps while its groups change. The class has many members because most functions
// use most of them.
class Elastic {
 public:
  // Starts this process's part of a run. `comm` must be shrinkable and outlive the object.
  Elastic(const TrainConfig& config, Communicator& comm);
  // Starts a joiner's part of a run with the settings `config`. Call join() next.
  explicit Elastic(const TrainConfig& config);
  // Ends admission and notifies waiting joiners.
  ~Elastic();

  // Returns the group. regroup(), move_on() and join() change the group and the settings in config().
  Communicator& comm() { return group_ ? *group_ : *first_; }
  const TrainConfig& config() const { return config_; }
  // Returns the run's settings at launch, which are equal on all ranks, joiners included.
  const TrainConfig& launched() const { return launched_; }

  // ---- New ranks

  // Opens admission. `validate` checks a joiner's description; see Transport::open_admission().
  void open_admission(std::function<std::string(const std::string& about)> validate);
  // Writes config().members, the file through which joiners find the group. Does nothing except on rank 0.
  void post_members();
  // Makes this joiner a member of `comm`. The joiner has no state yet.
  void join(std::unique_ptr<Communicator> comm);
  // Returns whether joiners were waiting after this step; the same on all ranks. Call after the step's
  // snapshot is complete and before the step after next is enqueued.
  bool joiners_wait(int64_t step) const { return snapshots_.at(step).joiners; }
  // Forms a group with the joiners. Returns whether the group has formed. If so, destroy the RankTrainer and
  // call move_on(). Collective; call after the newest step's snapshot is complete.
  bool grow();
  bool has_grown() const { return next_ != nullptr; }
  void move_on();

  // ---- Functions for the run's loop, after the group has failed and its RankTrainer is destroyed.

  // Returns whether there is a step to return to.
  bool has_begun() const { return reached() >= 0; }
  // Forms a group of the survivors. Collective over them. Throws CommError when the survivors do not find
  // each other, when the group excludes this rank, or when other ranks may have continued without it (split
  // brain). Throws Error when fewer ranks are left than --elastic allows. Both messages name the remedy.
  void regroup(const std::string& why);
  // Agrees on the step to continue from. Collective over a new group; does nothing in the first group.
  // Returns false if rank 0 has already reported the end of the run. Throws Error when the same step breaks
  // again although no rank is lost, CommError like any collective.
  bool agree();

  // ---- Functions for the RankTrainer.

  struct Start {
    Position position;                            // steps done, and the position in the data
    bool evaluation = false, checkpoint = false;  // due after these steps, but not yet done
  };
  // Returns the step to continue from; empty in the first group.
  const std::optional<Start>& start() const { return start_; }
  // Returns whether the run returns to a checkpoint when ranks are lost or join (--shard). start() is then
  // the position of config().resume, or the start of the run.
  bool from_checkpoints() const { return from_checkpoints_; }
  // Restores the state of start(). Collective over a group with joiners. Returns the result of
  // Snapshots::restore(). Must not be called if from_checkpoints().
  bool restore(const RankState& rank);
  // Returns whether this process has replaced a lost rank 0 and has not reported yet.
  bool takes_over() { return start_ && comm().rank() == 0 && !announced_; }
  // Returns whether this process is rank 0 and earlier reports of steps after start() are now void.
  bool takes_back() { return start_ && comm().rank() == 0 && from_checkpoints_ && record_.failed_at; }
  void announced() { announced_ = true; }
  // Returns the changes to report: the joined ranks if any, and the failure of the previous group if it has
  // failed, even if no rank was lost. Call when the group is ready for its next step. Later losses belong to
  // the next record.
  std::vector<GroupRecord> resumed();
  // Enqueues a snapshot on the rank's stream, after a step or before the first: see Snapshots.
  void take_snapshot(const RankState& rank, const Position& position, Snapshots::Pending pending);
  // Records that rank 0 has reported the evaluation after `step`.
  void evaluated(int64_t step) { evaluated_ = step; }
  void finished();

 private:
  static constexpr int kUnknown = -1;

  // The values for the next records.
  struct Record {
    std::vector<int> reported = {};  // numbers of the ranks in the latest record
    std::string why = {};            // the first error since the latest record
    std::optional<std::chrono::steady_clock::time_point> failed_at = {}, stopped_at = {};
  };
  TrainConfig config_for(int world) const;
  int64_t reached() const;  // steps done, as far as this process knows; -1: no state
  void go_back_to_checkpoint();
  std::string remedy() const;
  bool is_joiner();
  void agree_on_kept(int64_t step);

  const TrainConfig launched_;  // settings at launch
  const bool from_checkpoints_;
  // The checkpoint from which the run was resumed. Empty if none, or if this process is a joiner.
  const std::string resumed_;
  TrainConfig config_;
  Communicator* const first_;              // null for a joiner
  std::unique_ptr<Communicator> group_;    // null before the first regroup()
  std::unique_ptr<Communicator> next_;     // grown from the current group
  std::vector<int> ranks_;                 // launch or join number of each rank; kUnknown before agree()
  int next_number_ = 0;                    // number of the next joiner
  std::vector<int> joiners_;               // ranks in the group that have no state yet
  Snapshots snapshots_;                    // without states if from_checkpoints_
  Snapshots::Description start_snapshot_;  // describes the step to continue from
  std::optional<Start> start_;
  bool announced_ = false, finished_ = false;
  int64_t evaluated_ = -1;
  Record record_;
  // Detect a step that breaks repeatedly: the newest step that all ranks had finished at the latest agree();
  // whether ranks were lost or replaced since; and regroups without a lost rank or a finished step.
  int64_t broke_at_ = -1;
  bool ranks_changed_ = false;
  int fruitless_ = 0;
};

}  // namespace gradwire
