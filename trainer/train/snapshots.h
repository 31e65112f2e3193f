// The snapshots from which a rank repeats a step without the ranks that died in the step. A snapshot has the
// rank's state, in host memory, and the norms of all ranks' residuals after one of the last two steps.
//
// All survivors continue from the same step, the minimum over ranks of the newest finished step. Two
// snapshots are enough: a step's exchanges need data from every rank, so a rank that has finished step s + 1
// knows that all other ranks have finished step s. A rank finishes a step only after it has received all
// residual norms, so every survivor has the norms of dead ranks that it needs.
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

class Snapshots {
 public:
  // Creates an empty object. `states`: false with --shard, where each rank holds only its part, so no step
  // can be repeated. take() then stores only the exchanged values.
  explicit Snapshots(bool states) : states_(states) {}

  // The work that is due between a step and the next step.
  struct Pending {
    bool evaluation = false, checkpoint = false;
  };
  struct Description {
    Position position;
    Pending pending;
    std::vector<int> ranks;              // launch numbers of the group's ranks
    std::vector<double> residual_norms;  // residual norm of each rank of `ranks`
    bool joiners = false;                // joiners were waiting at the end of the step
  };

  // Enqueues a snapshot of the rank's state after position.step steps on its stream, and the exchange of
  // residual norms and waiting joiners. `ranks`: launch numbers of the group's ranks. Collective; host only.
  void take(const RankState& rank, const std::vector<int>& ranks, const Position& position, Pending pending);

  // ---- The following functions may be called only while no work is in flight.

  // Returns the newest step with a complete snapshot; nothing before the first complete snapshot.
  std::optional<int64_t> newest() const;
  // Returns the description of one of the two newest snapshots. Throws Error for any other step.
  const Description& at(int64_t step) const { return find(step).description; }
  // Drops snapshots after `step`, because all survivors continue from `step`.
  void drop_after(int64_t step);
  // Replaces a snapshot's description by the agreed description of the ranks of a grown group.
  void describe(const Description& description);
  // Takes the first snapshot of a joiner, after the joiner has received its state.
  void take_first(const RankState& rank, const Description& description);
  // Restores the state after `step` into a newly constructed rank of another group. Returns true if residuals
  // are in the reducer's gradients, as in restore_checkpoint().
  bool restore(const RankState& rank, int64_t step) const;

  // Returns the host memory in bytes for the snapshots of a rank with `elements` weights.
  static int64_t bytes(int64_t elements, int64_t moments, int64_t codec_bytes);

 private:
  static constexpr size_t kSlots = 2;
  struct Slot {
    std::atomic<int64_t> step{-1};  // -1 without a complete snapshot
    // Written only in stream order, because the host runs one step ahead and may still need the old content.
    Description description;
    std::vector<float> weights;
    std::vector<std::vector<float>> moments;
    ReducerSnapshot codecs;
    // The data of the exchange. The stream has passed a slot's previous exchange before the host prepares the
    // next exchange.
    std::vector<std::array<double, 2>> statuses;  // of each rank: residual norm, number of waiting joiners
    Call call;
    ExchangeLabel label;
    std::vector<Transfer> transfers;
  };
  Slot& slot_of(int64_t step) { return slots_[static_cast<size_t>(step) % kSlots]; }
  static void copy_state(Slot& slot, const RankState& rank);
  const Slot& find(int64_t step) const;

  const bool states_;
  std::array<Slot, kSlots> slots_;  // indexed by step modulo kSlots
};

// State transfer to ranks that join a running group: the state that is equal on all ranks (weights, moments,
// and codec state except residuals).

// Sends the state to the ranks `joiners`. Collective over the group, whose ranks hold the whole state on the
// host. Every other rank sends each joiner a part of every tensor, so that the links transfer the parts in
// parallel. No work may be in flight.
void transfer_state(const RankState& rank, const std::vector<int>& joiners);

}  // namespace gradwire
