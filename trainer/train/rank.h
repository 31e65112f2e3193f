// One rank of a training run: its stream, model, reducer, optimizer and data, driven by its own thread.
//
// The thread only enqueues. It runs at most one step ahead of its device: after enqueuing step s it waits for
// step s-1, to read that step's loss and times. The host never waits between backward and the optimizer.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "collectives/agreement/shared_clock.h"
#include "collectives/communicator/communicator.h"
#include "collectives/reducer/reducer.h"
#include "runtime/device.h"
#include "runtime/graph.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/checkpoint/gradients.h"
#include "trainer/config/run.h"
#include "trainer/data/dataset.h"
#include "trainer/data/loader.h"
#include "trainer/log/trace_file.h"
#include "trainer/measure/peaks.h"
#include "trainer/model/vit.h"
#include "trainer/train/deferred_update.h"
#include "trainer/train/elastic.h"
#include "trainer/train/evaluator.h"
#include "trainer/train/initial_weights.h"
#include "trainer/train/optimizer.h"
#include "trainer/train/profiling.h"
#include "trainer/train/rank_reports.h"
#include "trainer/train/weight_shards.h"

namespace gradwire {

// What all ranks of a run share. Everything outlives the ranks.
struct SharedRun {
  const TrainConfig& config;
  const DataSplits& data;
  RunObserver& observer;  // called by rank 0 only
  RankReports& reports;
  InitialWeights& initial;
  const Peaks* peaks = nullptr;  // null: not measured
  TraceFile* trace = nullptr;    // null: no trace
  SharedInstant instant = {};    // time 0 of the trace
  Elastic* elastic = nullptr;    // null without --elastic
};

class RankTrainer {
 public:
  RankTrainer(const SharedRun& shared, Communicator& comm);
  // Waits for all enqueued work. After a failure, abort the communicator first, or this waits for a peer.
  ~RankTrainer();
  RankTrainer(const RankTrainer&) = delete;
  RankTrainer& operator=(const RankTrainer&) = delete;

  // The whole run; or, with --elastic, until the group has grown.
  void run();
  // After a failure: gives the trace file the spans that it does not have yet.
  void keep_trace() { trace_.keep(); }

 private:
  // A step in flight. Two slots alternate.
  struct Slot : TrainingMarks {
    double lr = 0;
    Buffer totals;  // pinned: sum of losses, correct answers
    WeightShards::Sent weights;
    // --graph: the captured step, with these marks inside, and the batches that it reads.
    Graph graph;
    std::vector<Loader::Batch> batches;
    int64_t captured = -1;  // the step that was captured
    Event kept;             // --elastic: all have finished the step, and this rank can go back to its end
  };

  // The first step, and its position in the data. They differ only if the world size has changed since the
  // checkpoint, or since the run went back to it.
  struct Start {
    std::optional<CheckpointHead> from;
    const Elastic::Start* again = nullptr;  // after ranks were lost, or have joined
    int64_t step = 0;
    int64_t data_step = 0;  // steps with this run's global batch that would use as much data
  };
  static Start find_start(const SharedRun& shared, Communicator& comm);
  // `step`, counted as if the whole run had used the current global batch.
  int64_t data_step(int64_t step) const { return step - start_.step + start_.data_step; }

  bool leads() const { return comm_.rank() == 0; }
  // Whether that follows step `step`.
  bool evaluation_follows(int64_t step) const;
  bool checkpoint_follows(int64_t step) const;
  // After that many steps.
  Position position(int64_t steps_done) const;
  // What comes before the first step.
  void begin();
  void announce();
  // --elastic: enqueues a copy of the state after `steps_done` steps.
  void keep(int64_t steps_done);
  void enqueue_step(int64_t step);
  void separate_gradients();
  BlockCalls block_calls();
  void load(std::span<const float> weights);
  // Enqueues on stream_: what a checkpoint left over for the gradients of a bucket, which the first step adds to.
  void carry(int bucket);
  Loader::Batch next_batch(int64_t step);
  void enqueue_graph(Slot& slot);
  void enqueue_update(Slot& slot);
  // The part that a graph can capture: forward, backward, communication, optimizer.
  void enqueue_work(Slot& slot);
  // Waits until step `slot.step` is done, and reports it. `next_start`: the mark at which the next step
  // began; null when no step follows directly.
  void harvest(Slot& slot, const Event* next_start);
  void report(const Slot& slot, const Event& end);
  void report_waits(const Slot& slot, const std::vector<RankReports::Report>& reports);
  void evaluate(int64_t steps_done);
  void save(int64_t steps_done);
  RankState state();  // for checkpoints
  void restore();
  void finish();

  const SharedRun& shared_;
  const TrainConfig& config_;
  Communicator& comm_;
  Stream stream_;
  const Start start_;
  RankTrace trace_;
  Loader loader_;
  Reducer reducer_;
  // Of whole weights, moments and residuals; and of the gradients, which may be of some buckets only.
  const ParameterLayout layout_, gradient_layout_;
  Vit model_;
  Optimizer optimizer_;
  std::optional<WeightShards> shards_;      // none unless something is sharded
  std::optional<DeferredUpdate> deferred_;  // with --overlap-forward
  double before_ms_ = 0;                    // in the next step's forward: the end of the latest one reported
  std::optional<GradientDump> dump_;        // none on ranks and in runs that write no gradients
  std::optional<Evaluator> evaluator_;      // none when the run never evaluates
  const int64_t images_;                    // of this rank in a micro-batch
  int64_t steps_per_epoch_;
  const int64_t graph_from_;  // the first step that is launched as a graph
  Buffer own_gradients_;      // empty when gradients are views of the buckets
  float* gradients_;          // in gradient_layout_
  Buffer totals_;             // device: two doubles
  std::array<Slot, 2> slots_;
  bool newcomers_wait_ = false;  // since the latest step that was harvested
  bool carried_ = false;  // the gradient buffer holds a checkpoint's residuals; the first step adds to them
  Buffer left_over_;      // those residuals, where the gradient buffer has no room for all
  // When this rank's waits are due to be reported; and, on rank 0, what each rank last said, and since when.
  std::chrono::steady_clock::time_point waits_due_ = {};
  std::vector<std::vector<double>> latest_waits_;
  std::optional<std::chrono::steady_clock::time_point> first_waits_;
};

}  // namespace gradwire
