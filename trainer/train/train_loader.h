// The options of the loader of training batches.
#pragma once

#include "collectives/communicator/communicator.h"
#include "trainer/config/config.h"
#include "trainer/data/loader.h"

namespace gradwire {

// Returns the options for a rank of `comm`. `first_batch`: batches to skip.
inline LoaderOptions train_loader(const TrainConfig& config, const Communicator& comm, int64_t first_batch) {
  return {.rank = comm.rank(),
          .world = comm.world(),
          .batch_size = config.batch_size,
          .global_batch = config.micro_batch(),
          .group = config.accumulate,
          .shuffle = true,
          .drop_last = true,
          .augment = config.augment,
          .seed = config.seed,
          .first_batch = first_batch,
          // One batch trains while the next batch is loaded. A graph needs all batches of a step at once.
          .slots = config.graph ? 2 * config.accumulate : 2,
          .device = comm.device()};
}

}  // namespace gradwire
