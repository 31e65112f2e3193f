// One rank of a training run: its stream, model, reducer, optimizer and data, driven by a thread of its own.
//
// The thread only enqueues. It is at most one step ahead of its device: after enqueuing step s it waits for
// step s-1, to read that step's loss and times. Nothing waits between backward and optimizer.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "collectives/agreement/shared_clock.h"
#include "collectives/communicator/communicator.h"
#include "collectives/reducer/reducer.h"
#include "runtime/device.h"
#include "runtime/graph.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/config/run.h"
#include "trainer/data/dataset.h"
#include "trainer/data/loader.h"
#include "trainer/log/trace_file.h"
#include "trainer/measure/peaks.h"
#include "trainer/model/vit.h"
#include "trainer/train/evaluator.h"
#include "trainer/train/initial_weights.h"
#include "trainer/train/optimizer.h"
#include "trainer/train/profiling.h"
#include "trainer/train/rank_reports.h"

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
};

class RankTrainer {
 public:
  RankTrainer(const SharedRun& shared, Communicator& comm);
  // Waits for whatever is still enqueued. After a failure, abort the communicator first, or this waits for a
  // peer.
  ~RankTrainer();
  RankTrainer(const RankTrainer&) = delete;
  RankTrainer& operator=(const RankTrainer&) = delete;

  // The whole run.
  void run();
  // Of a run that has failed: gives the trace file what has not been handed over.
  void keep_trace() { trace_.keep(); }

 private:
  // A step in flight. Two of them alternate.
  struct Slot : TrainingMarks {
    double lr = 0;
    Buffer totals;  // pinned: sum of losses, correct answers
    // --graph: the step, with these marks inside, and what it reads.
    Graph graph;
    std::vector<Loader::Batch> batches;
    int64_t captured = -1;
  };

  // Where this run begins, and where that is in the data: the same, unless the world has changed meanwhile.
  struct Start {
    std::optional<CheckpointHead> from;
    int64_t step = 0;
    int64_t data_step = 0;  // steps of this run's size that would have brought the data there
  };
  static Start find_start(const TrainConfig& config, const Dataset& data, Communicator& comm);
  // Step `step`, counted as if the whole run had had today's global batch.
  int64_t data_step(int64_t step) const { return step - start_.step + start_.data_step; }

  bool leads() const { return comm_.rank() == 0; }
  void announce();
  void enqueue_step(int64_t step);
  void separate_gradients();
  Loader::Batch next_batch(int64_t step);
  void enqueue_graph(Slot& slot);
  // What is the same in each step: forward, backward, communication, optimizer.
  void enqueue_work(Slot& slot);
  // Reads step `slot.step` once it is done and reports it. `next_start`: where the following step began, or
  // null when something else follows.
  void harvest(Slot& slot, const Event* next_start);
  void report(const Slot& slot, const Event& end);
  void evaluate(int64_t steps_done);
  void save(int64_t steps_done);
  RankState state();
  void finish();

  const SharedRun& shared_;
  const TrainConfig& config_;
  Communicator& comm_;
  Stream stream_;
  const Start start_;
  RankTrace trace_;
  Loader loader_;
  Reducer reducer_;
  Vit model_;
  Optimizer optimizer_;
  std::optional<Evaluator> evaluator_;  // none when the run never evaluates
  int64_t steps_per_epoch_;
  const int64_t graph_from_;  // the first step that is launched as a graph
  Buffer own_gradients_;      // where they are not views of the buckets
  float* gradients_;
  Buffer totals_;  // device: two doubles
  std::array<Slot, 2> slots_;
  bool carried_ = false;  // the gradient buffer holds residuals of a checkpoint, for the first step to add to
};

}  // namespace gradwire
