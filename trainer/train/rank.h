// One rank of a training run: its stream, model, reducer, optimizer and data, driven by one thread.
//
// The thread only enqueues. It runs at most one step ahead of its device: after enqueuing step s it waits for
// step s-1, to read that step's loss and times. The host never waits between backward and the optimizer.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collectives/agreement/statements.h"
#include "collectives/communicator/communicator.h"
#include "collectives/reducer/reducer.h"
#include "runtime/device/device.h"
#include "runtime/device/graph.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/config/config.h"
#include "trainer/data/dataset.h"
#include "trainer/data/loader.h"
#include "trainer/log/observer.h"
#include "trainer/log/trace_file.h"
#include "trainer/measure/peaks.h"
#include "trainer/model/parameters.h"
#include "trainer/model/vit.h"
#include "trainer/train/deferred_update.h"
#include "trainer/train/elastic.h"
#include "trainer/train/optimizer_state.h"
#include "trainer/train/plan_change.h"
#include "trainer/train/run_reporter.h"
#include "trainer/train/weight_shards.h"

namespace gradwire {

// Evaluates the trained model on this rank's share of the test set.

class Evaluator {
 public:
  // Allocates an evaluator. `data` and `model` must outlive the object. The model's ops run on `stream`.
  Evaluator(const TrainConfig& config, const Dataset& data, const Communicator& comm, const Stream& stream,
            const Vit& model);

  // Returns the memory of an evaluator in bytes, without the weights of `model`.
  static int64_t bytes(const TrainConfig& config, const Stream& stream, const Vit& model);

  // Returns the loss and correct answers on this rank's images. The ranks' shares cover the test set exactly
  // once. Waits for the stream.
  RankReports::Report run();

 private:
  Stream stream_;
  Loader loader_;
  Vit model_;      // shares the weights of the trained model
  Buffer totals_;  // sum of losses and correct answers, two doubles
};

// The weights from which all ranks start. They are drawn once, copied by each rank, and freed after the last
// copy.

class InitialWeights {
 public:
  // Selects the source of the weights: `file`, or the seed if `file` is empty.
  explicit InitialWeights(uint64_t seed, std::string file = {}) : seed_(seed), file_(std::move(file)) {}

  // Returns the weights: a pure function of the arguments and the seed or file. Callers share the result
  // while any caller holds it.
  std::shared_ptr<const std::vector<float>> get(const std::vector<VitParameter>& parameters,
                                                const ParameterLayout& layout) {
    std::lock_guard lock(mutex_);
    auto values = values_.lock();
    if (values == nullptr || layout.offsets != layout_.offsets || layout.elements != layout_.elements) {
      auto fresh = std::make_shared<std::vector<float>>(static_cast<size_t>(layout.elements));
      if (file_.empty()) {
        vit_initialize(parameters, layout, seed_, *fresh);
      } else {
        load_weights(file_, parameters, layout, /*checksum_required=*/false, *fresh);
      }
      values = fresh;
      values_ = values;
      layout_ = layout;
    }
    return values;
  }

 private:
  const uint64_t seed_;
  const std::string file_;
  std::mutex mutex_;
  std::weak_ptr<const std::vector<float>> values_;
  ParameterLayout layout_;
};

struct AutoPlan;  // plan_change.h

// The objects that all ranks of a run share. They outlive the ranks.
struct SharedRun {
  const DataSplits& data;
  const RunObservers& observers;  // called only by rank 0
  RankReports& reports;
  InitialWeights& initial;
  const Peaks* peaks = nullptr;  // null: not measured
  TraceFile* trace = nullptr;    // null: no trace
  SharedInstant instant = {};    // time 0 of the trace
  Elastic* elastic = nullptr;    // null without --elastic
  // --compression auto: the request, so that the run can choose again; null: the compression does not change.
  const AutoPlan* plan = nullptr;
};

class RankTrainer {
 public:
  // `change`: after a change of plan, the state from which this rank continues. All references must outlive
  // the object.
  RankTrainer(const TrainConfig& config, const SharedRun& shared, Communicator& comm,
              const PlanChange* change = nullptr);
  // Waits for all enqueued work. After a failure, abort the communicator first, or the destructor waits for a
  // peer.
  ~RankTrainer();
  RankTrainer(const RankTrainer&) = delete;
  RankTrainer& operator=(const RankTrainer&) = delete;

  // Trains to the end of the run or, with --elastic, until the group has grown. Returns early if the plan has
  // become wrong, at the same step on all ranks.
  void run();
  // Returns the state from which a RankTrainer with another plan continues; empty at the end of the run.
  std::optional<PlanChange>& plan_change() { return plan_change_; }
  // Adds this rank's spans to the trace file after a failure, unless they were already added.
  void keep_trace() { trace_.keep(); }

 private:
  // A step in flight. Two slots alternate.
  struct Slot : TrainingMarks {
    double lr = 0;
    Buffer totals;  // pinned memory: sum of losses, and number of correct answers
    // --graph: the captured step, which contains these marks, and the batches that it reads.
    Graph graph;
    std::vector<Loader::Batch> batches;
    int64_t captured = -1;  // the step that was captured
    Event snapshot_done;    // --elastic: all ranks have finished the step, and its snapshot is complete
  };

  // The first step, and its position in the data. They differ only if the world size has changed since the
  // checkpoint or snapshot.
  struct Start {
    std::optional<CheckpointHead> from;
    const Elastic::Start* again = nullptr;  // set after ranks were lost or joined
    int64_t step = 0;
    int64_t data_step = 0;  // number of steps that use the same amount of data with the current global batch
  };
  Start find_start() const;
  // Converts `step` to the number that it would have if the whole run had used the current global batch.
  int64_t data_step(int64_t step) const { return step - start_.step + start_.data_step; }

  void create_slots();
  bool leads() const { return comm_.rank() == 0; }
  // Return whether an evaluation or a checkpoint is due after `step`.
  bool evaluation_follows(int64_t step) const;
  bool checkpoint_follows(int64_t step) const;
  // Returns the position after `steps_done` steps.
  Position position(int64_t steps_done) const;
  // Reports the run and does overdue evaluations and checkpoints before the first step.
  void start_run();
  void announce();
  // Enqueues a snapshot of the state after `steps_done` steps, for --elastic.
  void take_snapshot(int64_t steps_done);
  void enqueue_step(int64_t step);
  Loader::Batch next_batch(int64_t step);
  void enqueue_graph(Slot& slot);
  // Enqueues the work that a graph can capture: forward, backward, communication, optimizer.
  void enqueue_work(Slot& slot);
  // Waits until step `slot.step` is done, and reports it. `next_start`: the mark at which the next step
  // began; null if no step follows directly.
  void harvest(Slot& slot, const Event* next_start);
  void evaluate(int64_t steps_done);
  void save(int64_t steps_done);
  RankState state();  // returns the state for checkpoints
  void restore();
  // plan_change.cpp: whether the plan of --compression auto still holds.
  void prepare_plan_checks();
  void check_plan(const Slot& slot, const Event& end);
  // Returns whether the ranks agree after `step` on whether to continue with the plan.
  bool plan_check_follows(int64_t step) const;
  bool agree_to_replan(int64_t steps_done);
  // Returns whether the ranks agree after `step` on whether to end: about once a second.
  bool end_check_follows(int64_t step) const;
  // Writes a checkpoint, unless `saved`, and ends the process if a rank has got a signal. Returns whether the
  // run ends because it has diverged.
  bool agree_to_end(int64_t steps_done, bool saved);

  const TrainConfig& config_;
  const SharedRun& shared_;
  Communicator& comm_;
  const PlanChange* const change_;
  Stream stream_;
  const Start start_;
  RankTrace trace_;
  Loader loader_;
  Reducer reducer_;
  const ParameterLayout layout_;  // of weights, gradients, moments and residuals
  Vit model_;
  Optimizer optimizer_;
  std::optional<WeightShards> shards_;      // empty unless state is sharded
  std::optional<DeferredUpdate> deferred_;  // --overlap-forward
  std::optional<GradientDump> dump_;        // empty unless this rank writes gradients
  std::optional<Evaluator> evaluator_;      // empty if the run never evaluates
  const int64_t images_;                    // images of this rank per micro-batch
  RunReporter reporter_;
  const int64_t steps_per_epoch_;
  const int64_t graph_from_;  // the first step launched as a graph
  float* gradients_;          // laid out as layout_
  Buffer totals_;             // device memory: two doubles
  std::array<Slot, 2> slots_;
  std::optional<DriftDetector> drift_;  // rank 0 with SharedRun::plan
  std::optional<GradientDump> sample_;  // gradients whose encode error is measured
  ParameterLayout sample_layout_;
  int64_t sampled_ = -1;                   // the step of these gradients
  std::optional<PlanChange> plan_change_;  // the run continues with another plan
  // The latest agreement on whether to end: the steps done, then and at the next agreement, and the time.
  int64_t agreed_at_ = 0, agrees_next_ = 0;
  std::chrono::steady_clock::time_point agreed_ = std::chrono::steady_clock::now();
  bool joiners_wait_ = false;  // joiners were waiting at the latest harvested step
  bool carried_ = false;  // the gradient buffer has a checkpoint's residuals, to which the first step adds
};

// The options of the loader of training batches.

// Returns the options for a rank of `comm`. `first_batch`: batches to skip.
inline LoaderOptions train_loader(const TrainConfig& config, const Communicator& comm, int64_t first_batch) {
  return {.rank = comm.rank(),
          .world = comm.world(),
          .batch_size = config.batch_size,
          .global_batch = config.micro_batch(),
          .group = config.accumulate,
          .shuffle = true,
          .drop_last = true,
          .augment = config.augment,
          .seed = config.seed,
          .first_batch = first_batch,
          // One batch trains while the next batch is loaded. A graph needs all batches of a step at once.
          .slots = config.graph ? 2 * config.accumulate : 2,
          .device = comm.device()};
}

}  // namespace gradwire
