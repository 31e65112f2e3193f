// --shard optimizer: each rank updates a part of the weights, and the ranks gather the parts.
//
// A rank's part is its shard of each bucket (Reducer::owned()). With an exact format the shards are updated
// in place and all-gathered after the step. With any other format, each rank also keeps its shards in
// FP32 (master weights), which the optimizer updates. All ranks, including the owner, compute with the
// transmitted values. So all ranks hold the same bits, and the rounding errors of steps do not accumulate.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "collectives/program/program.h"
#include "collectives/reducer/reducer.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/config/config.h"
#include "trainer/model/vit.h"
#include "trainer/train/optimizer_state.h"

namespace gradwire {

class WeightShards {
 public:
  // Allocates the shards and binds the gathers. Collective. `model` runs on `stream`. All arguments must
  // outlive the object.
  WeightShards(const TrainConfig& config, Communicator& comm, const Stream& stream, const Reducer& reducer,
               Vit& model);
  WeightShards(const WeightShards&) = delete;

  // Returns this rank's shards in FP32: the weights that the optimizer updates and a checkpoint stores.
  Parts<float> weights() const;
  // Sends this rank's shards to every rank's model, in the transmitted format. Call after weights() changes.
  // Collective.
  void share_weights();
  // Copies the shards from `flat`, reducer.elements() floats on host or device, and shares them. Collective.
  void take_weights(const float* flat);
  // Returns the number of FP32 master weights of a rank: its part of the weights; 0 if updated in place.
  static int64_t master_elements(const TrainConfig& config, const Reducer& reducer);
  // The bytes that this rank sends for weights in a step: in the chosen format, and in FP32.
  struct Sent {
    uint64_t wire = 0, dense = 0;
  };
  Sent sent() const;

 private:
  using Programs = std::vector<std::unique_ptr<Program>>;
  // Builds a program per bucket that gathers the bucket's weights in format `wire`.
  Programs programs(const TrainConfig& config, const Wire& wire) const;

  Communicator& comm_;
  const Stream stream_;
  const Reducer& reducer_;
  Vit& model_;
  const std::vector<ElementRange> owned_;
  Buffer masters_;        // FP32 shards; empty if updated in place
  Programs gathers_;      // one program per bucket
  const Programs dense_;  // the same programs in FP32, to count their bytes; never run
  Buffer workspace_;      // sized for the largest gather
};

}  // namespace gradwire
