// --shard: each rank updates its own part of the weights, and the ranks gather them.
//
// A rank's part is its shard of each bucket (Reducer::owned()). With an exact format the shards are updated in place
// and all-gathered after the step. With another one, or where no rank has room for all weights (--shard full), each
// rank keeps its shards in FP32 besides: those are what the optimizer updates, and what every rank, this one too,
// computes with is what the wire carried. So all ranks hold the same bits, and the rounding of one step is not part
// of the next.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "collectives/program/program.h"
#include "collectives/reducer/reducer.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/config/config.h"
#include "trainer/model/vit.h"
#include "trainer/train/optimizer.h"
#include "trainer/train/weight_window.h"

namespace gradwire {

class WeightShards {
 public:
  // Collective. `model` is on `stream`; all must outlive the object.
  WeightShards(const TrainConfig& config, Communicator& comm, const Stream& stream, const Reducer& reducer,
               Vit& model);
  WeightShards(const WeightShards&) = delete;

  // This rank's shards in FP32: what the optimizer updates, and a checkpoint has.
  Parts<float> weights() const;
  // Gives every rank's model this rank's shards, as the wire carries them: after weights() has changed. Collective.
  void share_weights();
  // Takes the shards out of `flat`, (reducer.elements()) in host or device memory, and shares them. Collective.
  void take_weights(const float* flat);
  // Enqueues the optimizer's step, and the gather or the first of many; can be captured if not --shard full.
  void step(Optimizer& optimizer, Parts<const float> gradients);
  // --shard full: what the model calls before it uses a block's weights. Else null.
  WeightWindow* window() { return window_ ? &*window_ : nullptr; }
  // All weights as the model uses them, in the order of the flat buffer, in pieces on the device. Collective.
  void visit(const std::function<void(const float* weights, int64_t count)>& each);

  // Floats that a rank holds besides: its part of the weights, if the format is not exact.
  static int64_t master_elements(const TrainConfig& config, const Reducer& reducer);
  // By this rank since begin_step(), or in any one step where all are alike, for the weights: in the format that was
  // asked for, and what FP32 would have taken.
  struct Sent {
    uint64_t wire = 0, dense = 0;
  };
  void begin_step();
  Sent sent() const;

 private:
  using Programs = WeightWindow::Programs;
  // One per bucket, that gathers its weights in this format.
  Programs programs(const TrainConfig& config, const Wire& wire) const;

  Communicator& comm_;
  const Stream stream_;
  const Reducer& reducer_;
  Vit& model_;
  const std::vector<ElementRange> owned_;
  Buffer masters_;                      // FP32 shards; empty if the model's weights have them
  Programs gathers_;                    // by bucket
  const Programs dense_;                // the same in FP32, for its bytes; never run
  Buffer workspace_;                    // of the largest
  std::optional<WeightWindow> window_;  // --shard full
  Sent before_;                         // by the window, when the step began
};

}  // namespace gradwire
