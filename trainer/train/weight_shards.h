// --shard optimizer: each rank updates its own part of the weights, and the ranks then gather them.
//
// A rank's part is its shard of each bucket (Reducer::owned()). With an exact format the shards are updated in place
// and all-gathered. With another one each rank keeps its shards in FP32 besides: those are what the optimizer
// updates, and what every rank, this one too, computes with is what the wire carried. So all ranks hold the same
// bits, and the rounding of one step is not part of the next.
#pragma once

#include <memory>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "collectives/program/program.h"
#include "collectives/reducer/reducer.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/config/config.h"
#include "trainer/train/optimizer.h"

namespace gradwire {

class WeightShards {
 public:
  // Collective. `weights`: (reducer.elements()) floats on the communicator's device. All must outlive the object.
  WeightShards(const TrainConfig& config, Communicator& comm, const Stream& stream, const Reducer& reducer,
               float* weights);
  WeightShards(const WeightShards&) = delete;

  // After the weights were written as a whole, from a checkpoint or afresh: takes the shards from there, and leaves
  // there what the wire carries. Collective.
  void take_weights(const Stream& stream);
  // Enqueues the optimizer's step and the gather; can be captured.
  void step(const Stream& stream, Optimizer& optimizer, const float* gradients);

  // `packed`, this rank's shards one after another, of every rank: into `flat` (reducer.elements()), on the device.
  // Collective; `flat` is not part of a step.
  void gather(const Stream& stream, const float* packed, float* flat);
  // This rank's shards out of `flat`, which may be in host memory.
  void scatter(const Stream& stream, const float* flat, float* packed) const;
  // This rank's shards in FP32, one after another; null where `weights` has them.
  const float* masters() const { return masters_.as<const float>(); }

  // Floats that a rank holds besides: its part of the weights, if the format is not exact.
  static int64_t master_elements(const TrainConfig& config, const Reducer& reducer);
  // By this rank in one step, for the weights: in the format that was asked for, and in FP32.
  uint64_t bytes_sent() const { return sum_of_bytes(weights_programs_); }
  uint64_t dense_bytes() const { return sum_of_bytes(state_programs_); }

 private:
  static uint64_t sum_of_bytes(const std::vector<std::unique_ptr<Program>>& programs);
  // An all-gather of each bucket; `to` null: of other buffers each time.
  std::vector<std::unique_ptr<Program>> programs(const TrainConfig& config, const Stream& stream, Wire wire,
                                                 const char* what, float* to) const;

  Communicator& comm_;
  const Reducer& reducer_;
  float* weights_;
  const std::vector<ElementRange> owned_;
  Buffer masters_;  // FP32 shards; empty if the format is exact
  std::vector<std::unique_ptr<Program>> weights_programs_, state_programs_;  // by bucket
  Buffer workspace_;                                                         // of the largest
};

}  // namespace gradwire
