// The state that a rank keeps in host memory while its run changes to another plan (--compression auto).
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "collectives/reducer/snapshot.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/config/config.h"
#include "trainer/data/dataset.h"
#include "trainer/log/observer.h"
#include "trainer/measure/ranks.h"
#include "trainer/measure/recommend.h"
#include "trainer/train/run_reporter.h"

namespace gradwire {

struct PlanChange {
  Position position;
  RunReporter::Clock clock;
  std::chrono::steady_clock::time_point began;  // the end of the last step
  ReplanRecord record;                          // `why`: what has drifted since the plan began; on rank 0
  int64_t quiet = 0;                            // steps before the next plan may be questioned
  std::string spec;                             // whose codecs' state this is
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

// The file of --compression auto:plan=FILE: a choice that other runs of the same model and world repeat
// without measuring.

struct SavedPlan {
  std::string compression;
  double bucket_mb = 25;
  std::optional<LinkCosts> links;  // from which schedule=auto chooses
  PredictedStep predicted;
  std::string choice;  // the record of the choice for the log, as JSON

  // Returns the plan in the request's file; empty if there is no file. `bucket_mb`: the given --bucket-mb.
  // Throws BadInput, which names the file and the remedy, if the plan is for another model or number of
  // ranks, cannot be read, or is not one that this run may choose.
  static std::optional<SavedPlan> read(const AutoCompression& request, const TrainConfig& config,
                                       std::optional<double> bucket_mb);
  // Writes the file for a run with these settings. Throws Error.
  void write(const std::string& path, const TrainConfig& config) const;
};

// Detects that a plan of --compression auto has become wrong: the time on the links, or the error of an
// encode, has drifted for longer than noise.
//
// Links: a two-sided CUSUM of the times of the steps. The first kBaseline steps give the median and the
// deviation (from the median absolute deviation, so that outliers count little). A later step adds its
// standardized deviation, limited to kMax, minus the allowance kSlack. So an alarm needs more than
// kLimit / (kMax - kSlack) = 8 steps, however large the change, and a change within kSlack deviations, or of
// less than kSlack * kMin = 5 % of a step, never raises one. False alarms are rarer than 1 in 10,000 steps,
// also for heavy tails and correlated times (tests/trainer/drift_test.cpp simulates them).
//
// Prediction: if the baseline's step is outside the predicted interval, and its links take twice as long as
// predicted, or half, by more than 10 % of a step, the links changed before the first step.
//
// Quiet steps: what drifts during them counts only if it lasts until they end.
//
// Error: the measurement has no noise, but gradients vary. kStreak consecutive checks must exceed the limit.

class DriftDetector {
 public:
  static constexpr int kWarmup = 3;  // steps that are ignored, because caches and connections are cold
  static constexpr int kBaseline = 30;
  static constexpr double kMax = 4, kSlack = 2, kLimit = 16, kMin = 0.025;
  static constexpr int kStreak = 2;
  static constexpr size_t kLatest = 8;

  // `error_limit`: the largest error of one encode. `quiet`: steps without an alarm.
  explicit DriftDetector(double error_limit = std::numeric_limits<double>::infinity(), int64_t quiet = 0,
                         const std::optional<PredictedStep>& predicted = {})
      : error_limit_(error_limit), quiet_(quiet), predicted_(predicted) {}

  // Adds a step: the time of its exchanges, and the whole step. Ignores times that are not numbers.
  void add_step(double links_ms, double step_ms);
  // Adds a check of the error of one encode.
  void add_error(double error);
  // Returns what has drifted: "links take 310 ms per step instead of 12.1 ms"; empty while nothing has.
  std::string alarm() const { return steps_ < quiet_ ? "" : alarm_; }

 private:
  void compare_with_prediction(double links_ms);

  const double error_limit_;
  const int64_t quiet_;
  const std::optional<PredictedStep> predicted_;
  int64_t steps_ = 0;
  std::vector<double> links_, steps_ms_;  // of the baseline
  std::deque<double> latest_;             // the links' times of the last kLatest steps
  double median_ = 0, deviation_ = 0;
  double above_ = 0, below_ = 0;  // the sums of the test
  int streak_ = 0;
  std::string alarm_;
};

// Chooses the compression of a run from measurements before its first step: --compression auto.

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
                         const std::vector<float>& weights, Communicator& comm);

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
