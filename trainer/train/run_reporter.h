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
  // `images`: of this rank per micro-batch. All referenced arguments must outlive the object.
  RunReporter(const TrainConfig& config, Communicator& comm, const Reducer& reducer, RankReports& reports,
              RunObserver& observer, int64_t images);

  struct FinishedStep {
    const TrainingMarks& marks;
    const Event& end;      // the start of the next step, if one follows directly
    const double* totals;  // this rank's sum of losses, and correct answers
    int64_t epoch;
    double lr;
    WeightShards::Sent weights;
  };
  // Call the following functions on every rank in the same order. They block on rank 0 until all ranks have
  // posted their parts; they do not block on other ranks.
  void report_step(const FinishedStep& step);
  void report_evaluation(const RankReports::Report& mine, int64_t steps_done, double epoch);
  // `hash`: of the parameters. Rank 0 throws Error if a rank's hash differs from rank 0's.
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
      0;  // --overlap-forward: of the latest reported update, which the next forward contains
  std::chrono::steady_clock::time_point next_waits_ = {};  // when this rank reports its waits again
  // On rank 0: each rank's latest waits, and the time of the first complete report.
  std::vector<std::vector<double>> latest_waits_;
  std::optional<std::chrono::steady_clock::time_point> first_waits_;
};

}  // namespace gradwire
