// The state that a rank keeps in host memory while its run changes to another plan (--compression auto).
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "collectives/reducer/snapshot.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/train/run_reporter.h"

namespace gradwire {

struct PlanChange {
  Position position;
  RunReporter::Clock clock;
  // The end of the last step, and what has drifted since the plan began (on rank 0).
  std::chrono::steady_clock::time_point began;
  std::string why;
  std::string spec;  // whose codecs' state this is
  // Laid out as packed_layout(), because another bucket size may change the reducer's layout.
  std::vector<float> weights;
  std::vector<std::vector<float>> moments;
  ReducerSnapshot codecs;

  // Copies a rank's state. Blocks. The rank holds the whole state, and no work may be in flight.
  void take(const RankState& rank);
  // Restores the state into a new rank of the same model and world, and blocks. A codec of another spec
  // starts afresh: the residuals then go to the reducer's gradients, as in restore_checkpoint(). Returns
  // whether they did; then the first step must add its gradients to the residuals, so that nothing is lost.
  bool restore(const RankState& rank, const CompressionSpec& to) const;
  // Frees the memory of the state.
  void free();
};

}  // namespace gradwire
