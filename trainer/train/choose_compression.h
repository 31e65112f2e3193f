// Chooses the compression of a run from measurements before its first step: --compression auto.
#pragma once

#include <optional>

#include "collectives/communicator/communicator.h"
#include "trainer/config/config.h"
#include "trainer/data/dataset.h"
#include "trainer/log/observer.h"
#include "trainer/measure/recommend.h"
#include "trainer/measure/ranks.h"

namespace gradwire {

// The input of the choice of --compression auto.
struct AutoPlan {
  AutoCompression request;
  Choices choices;
  std::optional<PredictedStep> predicted = {};  // of the choice before the first step
  // The result of described_data() if ranks are processes, because it takes time.
  std::string about_data = {};
};

// Measures the links, the training speed of the run's model on its first batch, each candidate's kernels on a
// bucket of the run's tensors, and its error on rank 0's gradients after one update. Returns the report with
// the choice, the same on every rank. Collective; blocks for some steps of training. `comm`: this process's
// rank, whose link costs are set; null if ranks are threads of this process. Throws BadInput if processes
// were started with other settings, and CommError if a rank fails.
RanksReport choose_compression(const TrainConfig& config, const AutoPlan& plan, const DataSplits& data,
                               Communicator* comm);
// Does the same between two steps of the run, with the run's weights (packed_layout()) and its communicator.
// The present choice counts as a candidate, and is kept if it is within a tie of the best.
RanksReport choose_again(const TrainConfig& config, const AutoPlan& plan, const DataSplits& data,
                         std::vector<float> weights, Communicator& comm);

// Return the choice's prediction, and its record for the log. `step`: steps done; `why`: the reason for a
// choice during the run.
PredictedStep predicted_step(const RanksReport& report);
std::string choice_record(const RanksReport& report, const AutoCompression& request, const VitConfig& model,
                          int64_t step = 0, const std::string& why = {});
// Returns the flags of a run's choice.
std::string plan_flags(const TrainConfig& config);
// Applies the choice to the run's settings.
void apply_choice(const RanksReport& report, TrainConfig& config);

}  // namespace gradwire
