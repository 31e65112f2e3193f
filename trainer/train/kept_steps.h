// What a rank needs to repeat a step without the ranks that died in it: its state after each of the last two steps, in
// host memory, and how large every rank's residual was then.
//
// All survivors go on from the same step, the oldest of the newest that each has. Two are enough: a step's exchanges
// need data of every rank, so a rank that has finished step s + 1 knows that all others have finished step s. And a
// rank has finished a step only once it has everyone's residual norm, which makes the norms of a rank that dies later
// known to all who could need them.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "collectives/reducer/snapshot.h"
#include "collectives/transport/transport.h"
#include "trainer/checkpoint/checkpoint.h"

namespace gradwire {

class KeptSteps {
 public:
  // `states`: false where they are nowhere but with their ranks, so that nothing is to be gone back to (--shard). Then only
  // what keep() tells is kept.
  explicit KeptSteps(bool states) : states_(states) {}

  // What is due after a step besides the next one.
  struct Due {
    bool evaluation = false, checkpoint = false;
  };
  struct Kept {
    Position position;
    Due due;
    std::vector<int> ranks;              // of the group, as launched
    std::vector<double> residual_norms;  // of each of them
    bool newcomers = false;              // some waited to join when the step ended
  };

  // Enqueues on the rank's stream: copies its state after position.step steps, and exchanges norms, and whether
  // newcomers wait, with the others. `ranks`: how the group's were launched. Collective, on the host.
  void keep(const RankState& rank, const std::vector<int>& ranks, const Position& position, Due due);

  // The rest: while no work is in flight.
  // The newest step after which the state is complete; none before the first.
  std::optional<int64_t> newest() const;
  // Of that step, or of the one before the newest. Throws Error for any other.
  const Kept& at(int64_t step) const { return find(step).kept; }
  // All survivors go on from `step`, so later ones will be done again.
  void go_back_to(int64_t step);
  // What all ranks of a group that has grown know of a kept step.
  void describe(const Kept& kept);
  // For a rank that has joined: its state, which others have given it, is the one to go back to.
  void begin(const RankState& rank, const Kept& kept);
  // Gives a rank of another group, fresh from its constructor, the state after `step`. True if residuals are in
  // rank.left_over(), as in restore_checkpoint().
  bool restore(const RankState& rank, int64_t step) const;

  // Host memory that a rank with `elements` weights and this much other state will need.
  static int64_t bytes(int64_t elements, int64_t moments, int64_t codec_bytes);

 private:
  static constexpr size_t kSlots = 2;
  struct Slot {
    std::atomic<int64_t> step{-1};  // -1: none, or incomplete
    // Written on the stream only: the host is a step ahead, and what is here may be needed until the stream gets there.
    Kept kept;
    std::vector<float> weights;
    std::vector<std::vector<float>> moments;
    ReducerSnapshot codecs;
    // The exchange. The stream has passed its last one by the time the host prepares another.
    struct Told {
      double residual_norm = 0, newcomers = 0;  // who wait
    };
    std::vector<Told> told;  // by rank
    Call call;
    ExchangeLabel label;
    std::vector<Transfer> transfers;
    Event ended, exchanged;
  };
  Slot& slot_of(int64_t step) { return slots_[static_cast<size_t>(step) % kSlots]; }
  static void copy_state(Slot& slot, const RankState& rank);
  void tell(Slot& slot, const RankState& rank, const Stream& stream);
  const Slot& find(int64_t step) const;

  const bool states_;
  std::array<Slot, kSlots> slots_;  // by step
};

}  // namespace gradwire
