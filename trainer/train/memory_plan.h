// The device memory of a run, planned before it starts.
#pragma once

#include <cstdint>
#include <string>

#include "collectives/reducer/reducer.h"
#include "trainer/config/config.h"

namespace gradwire {

struct RunMemory {
  int64_t model = 0;          // weights, activations of one batch, and loaded images
  int64_t gradients = 0;      // one FP32 value per parameter, including gaps between tensors
  int64_t optimizer = 0;      // moments and, with --gather-weights, a rank's FP32 weights
  ReducerMemory compression;  // the reducer's memory in addition to the gradients
  int64_t kept = 0;           // --elastic: bytes of the snapshots of the last two steps
  int64_t evaluation = 0;     // activations of an evaluation batch, and loaded images

  int64_t total() const { return model + gradients + optimizer + compression.total() + kept + evaluation; }
};

// Returns rank 0's memory; other ranks differ by the rounding of their chunks. Builds rank 0's model and
// reducer on the host without peers. This briefly takes as much host memory, except for activations.
RunMemory plan_memory(const TrainConfig& config);

// Returns the plan as lines of text, compared with the free memory of this process's GPUs or with the control
// group's limit.
std::string memory_text(const TrainConfig& config, const RunMemory& memory);
// Throws BadInput if the run needs more than its --memory-limit or, without one and on the host, than the
// control group allows. The message names the required memory and, for a run without --shard, the memory
// with --shard optimizer.
void check_memory_limit(const TrainConfig& config);

}  // namespace gradwire
