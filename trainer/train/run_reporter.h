// Reports steps, evaluations and the end of a run: every rank posts its part, and rank 0
// sums the parts and calls the observer.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collectives/agreement/statements.h"
#include "collectives/communicator/communicator.h"
#include "collectives/reducer/reducer.h"
#include "runtime/device/device.h"
#include "runtime/trace/trace.h"
#include "trainer/config/config.h"
#include "trainer/data/dataset.h"
#include "trainer/log/observer.h"
#include "trainer/log/trace_file.h"
#include "trainer/train/weight_shards.h"

namespace gradwire {

// Sends each rank's numbers for the log to rank 0: losses, test totals, parameter hashes.
//
// post() never blocks, so no step waits for a report. Only collect() on rank 0 blocks. Round k consists of
// the k-th report of every rank.

class RankReports {
 public:
  struct Report {
    double loss = 0;     // sum over the images
    double correct = 0;  // correct answers
    int64_t images = 0;
    uint64_t hash = 0;                  // hash of the parameters
    std::vector<double> waited_s = {};  // seconds waited for each rank so far; may be empty
  };

  virtual ~RankReports() = default;
  virtual void post(int rank, const Report& report) = 0;
  // Returns the reports of the next round, in rank order. Blocks until every rank has posted its report.
  // Throws CommError if a rank does not post in time, or after the group was aborted.
  virtual std::vector<Report> collect() = 0;
};

// Reports of ranks that are threads of one process. All ranks share one object.
class LocalRankReports final : public RankReports {
 public:
  LocalRankReports(int world, std::chrono::milliseconds timeout);
  void post(int rank, const Report& report) override;
  std::vector<Report> collect() override;
  void abort(const std::string& reason);

 private:
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<Report>> posted_;
  std::string aborted_;  // the reason; empty while not aborted
};

// Reports of ranks that are processes. Each rank has a separate object, which sends the reports as messages
// of the communicator.
class MessageRankReports final : public RankReports {
 public:
  explicit MessageRankReports(Communicator& comm) : comm_(comm) {}
  void post(int rank, const Report& report) override;
  std::vector<Report> collect() override;

 private:
  Communicator& comm_;
};

// The times of one training step: marks on the rank's stream, and times on the rank's thread.

struct TrainingMarks {
  // The marks of a micro-batch: the starts of the three phases, and the end of the last phase.
  struct Micro {
    Event data, forward, backward, done;
  };
  // --overlap-forward: the wait for a bucket's gradients, and the update of the bucket's weights.
  struct Update {
    Event wait, begin, end;
  };
  int64_t step = -1;
  SteadyTime enqueue_begin, enqueue_end, wait_begin, wait_end;  // times on the thread
  std::vector<Micro> micros;                                    // config.accumulate elements
  Event reduced, end;           // the gradients are averaged; the parameters are updated
  std::vector<Update> updates;  // one per bucket; empty without --overlap-forward
  // Parameters are updated inside the next forward, not after this step's backward.
  bool updated_in_forward = false;

  double backward_ms() const {
    double ms = 0;
    for (const Micro& micro : micros) ms += elapsed_ms(micro.backward, micro.done);
    return ms;
  }
};

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
              const RunObservers& observers, int64_t images, const Clock& clock);
  const Clock& clock() const { return clock_; }

  // Report a step, an evaluation or the end of the run. Call these functions on every rank in the same order.
  // On rank 0 they block until all ranks have posted their parts. On other ranks they do not block.
  // `end`: the start of the next step, if one follows directly. `totals`: this rank's sum of losses, and
  // number of correct answers.
  void report_step(const TrainingMarks& marks, const Event& end, const double* totals, int64_t epoch,
                   double lr, const WeightShards::Sent& weights);
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
  const RunObservers& observers_;
  const int64_t images_;
  double updated_ms_ =
      0;  // --overlap-forward: time of the latest reported update, which the next forward contains
  bool diverged_ = false;  // the latest loss is not finite
  bool warned_ = false;    // of the first such loss
  Clock clock_;
  std::chrono::steady_clock::time_point next_waits_ = {};  // when this rank reports its waits again
  std::vector<std::vector<double>> latest_waits_;          // of each rank; used only on rank 0
};

// Checks that the ranks of a run were started with the same settings and data. Processes have separate flags,
// and ranks must not average gradients of different trainings.

// Describes the data. Reads all images: call once per process, and not while other ranks wait.
std::string described_data(const DataSplits& data);
// Describes the settings, the data (described_data()) and the arithmetic.
std::string described_run(const TrainConfig& config, const std::string& data);

// Returns the first line in which two descriptions differ: "learning rate 0.1 there, 0.2 here".
std::string first_difference(const std::string& remote, const std::string& local);

// Compares the descriptions of all ranks, which are processes. Collective. Throws BadInput on rank 0, which
// names the rank and the difference.
void check_agreement(const std::string& local, Communicator& comm);

// A fingerprint of parameters by their bits: equal hashes on all ranks mean equal models.

// Returns the FNV-1a hash of the values' 32-bit words. Every bit affects the hash: -0 differs from 0, and
// NaNs with different bits differ.
uint64_t parameter_hash(std::span<const float> values);
// Returns the value as 16 hexadecimal digits.
std::string hex(uint64_t value);

// One rank's side of --trace and --trace-steps.

// Starts CUDA's profiler before the first step of --trace-steps, and stops it after the last.
// Call before each step, and once after the last step of the run.
void profile(const TrainConfig& config, Communicator& comm, const Stream& stream, int64_t step);

// --trace: collects the spans of this rank's steps from the marks that the log uses.
class RankTrace {
 public:
  // Prepares the trace. `file`: null without --trace; the class then does nothing. `instant`: time 0 of the
  // trace.
  RankTrace(const TrainConfig& config, Communicator& comm, TraceFile* file, const SharedInstant& instant);

  // Returns the sink for spans within the phases of a step; null without --trace.
  Tracer* tracer() { return tracer_ ? &*tracer_ : nullptr; }
  // Adds the spans of a finished step, which ended at `end`. The last traced step sends all spans to the
  // trace file.
  void add(const TrainingMarks& marks, const Event& end, const std::string& row, const Reducer& reducer);
  // Adds the spans to the trace file after a failure, unless they were already added.
  void keep();

 private:
  std::string text();
  void send_spans();

  const TrainConfig& config_;
  Communicator& comm_;
  TraceFile* const file_;
  const SharedInstant instant_;
  std::optional<Tracer> tracer_;
};

}  // namespace gradwire
