// Reports steps, evaluations and the end of a run: every rank posts its part (rank_reports.h), and rank 0
// sums the parts and calls the observer.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "collectives/reducer/reducer.h"
#include "trainer/config/config.h"
#include "trainer/log/observer.h"
#include "trainer/train/rank_reports.h"
#include "trainer/train/training_marks.h"
#include "trainer/train/weight_shards.h"

namespace gradwire {

class RunReporter {
 public:
  // The state that the next reporter of the same run continues.
  struct Clock {
    double trained_ms = 0;  // sum of the reported steps
    // When the first report of waits was complete; used only on rank 0.
    std::optional<std::chrono::steady_clock::time_point> first_waits = {};
  };

  // Prepares the reports. `images`: this rank's images per micro-batch. All referenced arguments must outlive
  // the object.
  RunReporter(const TrainConfig& config, Communicator& comm, const Reducer& reducer, RankReports& reports,
              RunObserver& observer, int64_t images, const Clock& clock);
  const Clock& clock() const { return clock_; }

  struct FinishedStep {
    const TrainingMarks& marks;
    const Event& end;      // the start of the next step, if one follows directly
    const double* totals;  // this rank's sum of losses, and number of correct answers
    int64_t epoch;
    double lr;
    WeightShards::Sent weights;
  };
  // Report a step, an evaluation or the end of the run. Call these functions on every rank in the same order.
  // On rank 0 they block until all ranks have posted their parts. On other ranks they do not block.
  void report_step(const FinishedStep& step);
  void report_evaluation(const RankReports::Report& mine, int64_t steps_done, double epoch);
  // Returns whether the loss of the latest reported step is not finite. False except on rank 0.
  bool diverged() const { return diverged_; }
  // Reports the end of the run. `hash`: hash of the parameters. Rank 0 throws Error if another rank's hash
  // differs.
  void report_end(uint64_t hash);

 private:
  void report_waits(const TrainingMarks& marks, const std::vector<RankReports::Report>& reports);

  const TrainConfig& config_;
  Communicator& comm_;
  const Reducer& reducer_;
  RankReports& reports_;
  RunObserver& observer_;
  const int64_t images_;
  double updated_ms_ =
      0;  // --overlap-forward: time of the latest reported update, which the next forward contains
  bool diverged_ = false;  // the latest loss is not finite
  bool warned_ = false;    // of the first such loss
  Clock clock_;
  std::chrono::steady_clock::time_point next_waits_ = {};  // when this rank reports its waits again
  std::vector<std::vector<double>> latest_waits_;          // of each rank; used only on rank 0
};

}  // namespace gradwire
