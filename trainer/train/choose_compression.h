// Chooses the compression of a run from measurements before its first step: --compression auto.
#pragma once

#include "collectives/communicator/communicator.h"
#include "trainer/config/config.h"
#include "trainer/data/dataset.h"
#include "trainer/measure/auto_compression.h"
#include "trainer/measure/ranks.h"

namespace gradwire {

// Measures the links, the training speed of the run's model on its first batch, each candidate's kernels on a
// bucket of the run's tensors, and its error on rank 0's gradients after one update. Returns the report with
// the choice, the same on every rank. Collective; blocks for some steps of training. `choices`: the
// candidates. `comm`: this process's rank, whose link costs are set; null if ranks are threads of this
// process. Throws BadInput if processes were started with other settings, and CommError if a rank fails.
RanksReport choose_compression(const TrainConfig& config, const AutoCompression& request,
                               const Choices& choices, const DataSplits& data, Communicator* comm);

// Applies the choice to the run's settings.
void apply_choice(const RanksReport& report, TrainConfig& config);

}  // namespace gradwire
