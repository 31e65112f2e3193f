// --elastic: a run of processes that goes on without those that die, and takes new ones.
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
//   a newcomer        knocks (rendezvous/newcomer.h), and waits. The ranks hear of it in the exchange that follows each step
//   grow()            after the next step they form a group with those that wait, and their RankTrainers go
//   agree()           as above; the newcomers have no state, and get numbers that no rank has had
//   a new RankTrainer takes the state that it left off with; newcomers get it from the others (hand_over.h), but for
//                     residuals, which begin with 0
//
// A newcomer that has no state yet is no loss: whatever fails, it leaves, and knocks again.
//
// With --shard nobody else has what a lost rank held, so the state to go on from is the newest checkpoint's, for the ranks
// that are left and for newcomers, for whom one is made. Residuals of lost ranks are in it, too.
//
// A rank that fails by itself (its disk is full) is lost to the others like one that is killed. What fails before the
// first step ends the run.
#pragma once

#include <chrono>
#include <functional>
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
  // This process's part of a run that was begun by others, with these settings. Followed by join().
  explicit Elastic(const TrainConfig& config);
  // Tells those who wait to join that the run has ended.
  ~Elastic();

  // The group, and the run's settings for it. Both change in regroup(), move_on() and join().
  Communicator& comm() { return group_ ? *group_ : *first_; }
  const TrainConfig& config() const { return config_; }
  // The run's settings as all of its ranks have them, early or late.
  const TrainConfig& launched() const { return launched_; }

  // ---- New ranks

  // Newcomers may knock if `judge` lets them: see Transport::open_door().
  void open_door(std::function<std::string(const std::string& about)> judge);
  // On rank 0: keeps config().members, the file by which newcomers find the group.
  void post_members();
  // This newcomer is part of `comm`, and knows nothing else yet.
  void join(std::unique_ptr<Communicator> comm);
  // Whether newcomers waited after this step, in which case all ranks know it. After the step is kept, before the one
  // after the next is enqueued.
  bool newcomers_wait(int64_t step) const { return kept_.at(step).newcomers; }
  // Collective, after the newest step is kept. True: a group with newcomers has formed. The RankTrainer is to end, then
  // move_on().
  bool grow();
  bool has_grown() const { return next_ != nullptr; }
  void move_on();

  // ---- For the run's loop: once the group has failed and its RankTrainer is gone.

  // Whether there is a step to go back to.
  bool has_begun() const { return reached() >= 0; }
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
  // Whether steps done since the newest checkpoint are lost with a rank, and newcomers begin with one. start() is then
  // that of config().resume, or the run's own beginning.
  bool from_checkpoints() const { return from_checkpoints_; }
  // Takes the state to go on from; collective over a group with newcomers. See KeptSteps::restore(). Not from checkpoints.
  bool restore(const RankState& rank);
  // This process is rank 0 since the one before it is lost, and has not reported anything yet.
  bool takes_over() { return start_ && comm().rank() == 0 && !announced_; }
  // This process is rank 0, and what it or another has reported of steps after start() does not hold any more.
  bool takes_back() { return start_ && comm().rank() == 0 && from_checkpoints_ && failed_at_; }
  void announced() { announced_ = true; }
  // The group is ready for its next step, ranks that are lost from here on belong to the next record. What there is to
  // report: who has joined, who is lost, or, with neither, that the group has formed again.
  struct Changes {
    std::optional<GrowRecord> grown;
    std::optional<ShrinkRecord> shrunk;
  };
  Changes resumed();
  // Enqueues on the rank's stream, after a step or before the first one: see KeptSteps.
  void keep(const RankState& rank, const Position& position, KeptSteps::Due due);
  // Rank 0 has reported the evaluation after this step, or the end.
  void evaluated(int64_t step) { evaluated_ = step; }
  void finished();

 private:
  static constexpr int kUnknown = -1;

  TrainConfig config_for(int world) const;
  int64_t reached() const;  // steps done, as far as this process knows; -1: it has no state
  void go_back_to_checkpoint();
  std::string remedy() const;
  void number_ranks(const std::vector<std::vector<double>>& told);
  void agree_on_kept(int64_t step);
  std::vector<int> lost() const;

  const TrainConfig launched_;  // the settings, with all ranks that were launched
  const bool from_checkpoints_;
  const std::string
      resumed_;  // the checkpoint with which the run began; empty: none, or not known to a newcomer
  TrainConfig config_;
  Communicator* const first_;            // null for a newcomer
  std::unique_ptr<Communicator> group_;  // none before the first regroup()
  std::unique_ptr<Communicator> next_;   // that has grown out of it
  std::vector<int> ranks_;  // of the group, as launched, or numbered as they joined; kUnknown before agree()
  int next_number_ = 0;     // of the next to join
  std::vector<int> newcomers_;  // their ranks in the group, as long as they have no state
  KeptSteps kept_;              // from_checkpoints_: without states
  KeptSteps::Kept start_kept_;  // what is known of the step to go on from
  std::optional<Start> start_;
  bool announced_ = false, finished_ = false;
  int64_t evaluated_ = -1;
  int64_t broke_at_ = -1;  // the newest step that all had done by the latest agree()
  // For the next records.
  std::vector<int> reported_;  // the ranks of which all know
  std::string why_;
  std::optional<std::chrono::steady_clock::time_point> failed_at_, stopped_at_;
  bool others_ = false;  // since the latest agree() the group has lost ranks, or has others
  int fruitless_ = 0;    // how often the group has formed again without losing a rank or doing a step
};

}  // namespace gradwire
