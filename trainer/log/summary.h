// The summary of a finished run: medians over its steps, and its last evaluation.
#pragma once

#include <cmath>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "trainer/config/config.h"
#include "trainer/log/observer.h"

namespace gradwire {

// The parts of a step whose fractions of the step time are reported. The first kPhases are the phases of the
// compute stream, in sequence. The others are on the communication stream, in parallel to the compute stream.
struct StepShare {
  const char *key, *name;
  double StepValues::*time;
};
inline constexpr StepShare kStepShares[] = {
    {"data", "waiting for data", &StepValues::data_ms},
    {"forward", "forward", &StepValues::forward_ms},
    {"backward", "backward", &StepValues::backward_ms},
    {"exposed_comm", "waiting for communication", &StepValues::exposed_comm_ms},
    {"optimizer", "optimizer", &StepValues::optimizer_ms},
    {"compress", "compression", &StepValues::compress_ms},
    {"communicate", "communication", &StepValues::communicate_ms},
    {"decompress", "decompression", &StepValues::decompress_ms}};
inline constexpr size_t kPhases = 5;

// The figures of a run. Its StepValues are medians over the steps.
struct RunSummary : StepValues {
  int64_t steps = 0;
  double seconds = 0;  // time from the first step to the end of the last evaluation
  // Mean training loss of the last kFinalLossSteps steps, or of the steps since the loss was last not finite
  // if fewer. NaN if the run has diverged: the loss of its last step, or of the evaluation after it, is not
  // finite.
  double final_loss = 0;
  std::vector<EvalRecord> evals;
  std::optional<double> test_loss;      // of the last evaluation; empty without evaluations, and if diverged
  std::optional<double> test_accuracy;  // fraction from 0 to 1
  double data_wait_share = 0;           // the device's wait for batches / total step time
  std::optional<double> peak_fraction;  // tflops / the measured peak; empty if not measured
  uint64_t total_wire_bytes = 0;        // sent by rank 0 over the whole run
  std::optional<double> ratio;          // dense_bytes / wire_bytes; empty if nothing was sent
  StepValues shares;       // the times of kStepShares as fractions of the step time, over all steps
  double other_share = 0;  // the rest of the step time
  // The fraction of the communication stream's time for which the compute stream did not wait. Empty without
  // communication.
  std::optional<double> hidden_of_comm;
  std::string schedule;
  int64_t parameters = 0;  // the model's parameters
  // As in EndRecord; empty for a run read from its log.
  std::vector<std::vector<double>> waited_s;
  int64_t memory_bytes = 0;                // per rank; 0 for a run read from its log
  std::optional<PredictedStep> predicted;  // --compression auto: the latest plan
  StepParts measured;                      // medians over the steps of the latest plan
  bool diverged() const { return steps > 0 && !std::isfinite(final_loss); }
};

constexpr int64_t kFinalLossSteps = 20;

// Returns the training time until the first evaluation with at least this accuracy; empty if none reached it.
std::optional<double> seconds_to(const RunSummary& summary, double accuracy);

// Returns the median, ignoring NaN values (not measured). NaN if no value was measured.
double median(std::vector<double> values);

// Collects a run's records and summarizes them.
class Summarizer final : public RunObserver {
 public:
  void on_run(const RunInfo& info) override;
  void on_step(const StepRecord& step) override;
  void on_eval(const EvalRecord& eval) override;
  void on_replan(const ReplanRecord& replan) override;
  void on_end(const EndRecord& end) override;
  RunSummary summary(double seconds) const;
  // Returns whether this process has reported the end of the run. With --elastic any rank may report the end.
  bool ended() const { return ended_; }

 private:
  RunInfo info_;
  std::vector<StepRecord> steps_;
  std::vector<EvalRecord> evals_;
  EndRecord end_;
  int64_t plan_from_ = 0;  // the first step of the latest plan
  std::optional<PredictedStep> predicted_;
  bool ended_ = false;
};

// The result of `gradwire compare`: its table and its JSON.

struct SeedRun {
  uint64_t seed = 0;
  RunSummary summary;
  std::string log;  // file name; "" for no log
};

// A compression with a bucket size, and at least one run: one run per seed.
struct ComparedRun {
  std::string compression;
  std::vector<SeedRun> seeds = {};
  int ranks = 1;
  std::string device = {};  // "host" or "cuda"
  std::string link = {};    // EmulatedLink::to_string(); "" if links are not emulated
  double bucket_mb = 0;
};

// Return the JSON array that `gradwire compare --json` writes (docs/formats.md), and a table with a line per
// compression and bucket size. `target`: the percentage of --target-accuracy, for the time to this accuracy.
std::string compare_document(const std::vector<ComparedRun>& runs, std::optional<double> target = {});
std::string compare_table(const std::vector<ComparedRun>& runs, std::optional<double> target = {});

// Finds stragglers: ranks for whose data the other ranks wait.

struct Straggler {
  int rank = 0;
  double behind_s = 0;  // mean wait of the other ranks minus this rank's wait
  double share = 0;     // behind_s / the measured time
};

// Finds the straggler. waited_s: as in WaitRecord, collected over `seconds`. Returns nothing if no rank waits
// clearly less than the others.
std::optional<Straggler> find_straggler(const std::vector<std::vector<double>>& waited_s, double seconds);

// Collects the wait records of a run, in order.
class WaitHistory {
 public:
  // Adds a record. The history restarts if the number of ranks changes, or if time goes back, as after a
  // resume.
  void add(const WaitRecord& record);

  // Return the waits, time and steps over the last kWindow records. Empty and 0 before the second record.
  std::vector<std::vector<double>> recent_waits() const;
  double recent_seconds() const;
  int64_t recent_steps() const;

  struct Finding {
    Straggler straggler;  // the straggler in the window
    int64_t since_step = 0;
    double since_s = 0;  // the records' time at which this rank became the straggler
  };
  const std::optional<Finding>& finding() const { return finding_; }

  double finding_age_s() const { return finding_ ? window_.back().seconds - finding_->since_s : 0; }

  static constexpr size_t kWindow = 5;

 private:
  std::deque<WaitRecord> window_;  // up to kWindow + 1 records
  std::optional<Finding> finding_;
};

// Text tables and report lines.

using Table = std::vector<std::vector<std::string>>;  // rows of cells; the first row is the heading

// Returns lines that start with `indent`. The first column is aligned left, the other columns right. If
// `rule`, adds dashes under the heading.
std::string table_text(const Table& table, const std::string& indent = "  ", bool rule = false);

// Returns one line of a report: "  name              value".
std::string row_text(const std::string& name, const std::string& value);

}  // namespace gradwire
