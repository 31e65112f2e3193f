// The interface of the training loop: its settings, and what it reports while it runs.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "trainer/config/config.h"

namespace gradwire {

class Communicator;  // collectives/communicator/communicator.h
struct DataSplits;   // trainer/data/dataset.h

// Known once the model and the reducer exist, before the first step.
struct RunInfo {
  int64_t parameters = 0;
  int64_t tensors = 0;
  int buckets = 0;                  // 0 in a world of 1
  std::string schedule;             // the one in use: "ring", "two_shot", ...; "none" in a world of 1
  std::string schedule_reason;      // Reducer::schedule_reason()
  std::string reducer;              // Reducer::describe()
  int64_t reducer_extra_bytes = 0;  // device memory per rank for residuals, factors and staging
  double peak_tflops = std::numeric_limits<double>::quiet_NaN();  // NaN: not measured (measure/peaks.h)
  double copy_gb_per_s = std::numeric_limits<double>::quiet_NaN();
  double fma_share = std::numeric_limits<double>::quiet_NaN();
  std::string slow_products;  // a warning, or empty
  std::string products;       // the host's BLAS (measure/products.h); empty on a GPU
  int64_t first_step = 0;     // steps done by the checkpoint that the run resumes from
  // --elastic: the rank that reported so far is lost, and this one goes on from first_step; or this rank reported
  // them, and the run goes back to first_step. A ShrinkRecord follows.
  bool takes_over = false;
};

// One optimizer step, as seen by rank 0. Times that were not measured are NaN.
struct StepRecord {
  int64_t step = 0;          // from 0
  int64_t epoch = 0;         // of the step's first image, from 0
  double loss = 0;           // mean over the global batch, before the update
  double lr = 0;             // used in this update
  double step_ms = 0;        // from the start of this step to the start of the next
  double images_per_s = 0;   // over all ranks: global batch / step_ms
  uint64_t wire_bytes = 0;   // sent by rank 0, measured at the transport
  uint64_t dense_bytes = 0;  // what the same schedule sends in FP32
  double comm_ms = 0;        // on the reducer's stream, compression included
  double compress_ms = 0, communicate_ms = 0, decompress_ms = 0;  // its parts (collectives/program/phases.h)
  double exposed_comm_ms = 0;  // how long the optimizer waited for communication
  double data_ms = 0;          // how long the device waited for the batch
  double forward_ms = 0;
  double backward_ms = 0;
  double optimizer_ms = 0;
  double tflops = 0;  // of rank 0's device: FLOPs of the products of all ranks on it / step time
};

// An evaluation on the whole test set, over all ranks.
struct EvalRecord {
  int64_t step = 0;  // optimizer steps done
  double epoch = 0;  // passes over the training set
  double test_loss = 0;
  double test_accuracy = 0;  // 0 to 1
  int64_t images = 0;
};

// A checkpoint that is complete and on disk.
struct CheckpointRecord {
  int64_t step = 0;    // optimizer steps done
  std::string path;    // of its folder
  uint64_t bytes = 0;  // of rank 0's files
  double save_ms = 0;  // from the end of the step to the end of writing
};

// --elastic: the run goes on without some of its ranks. Ranks are named by the numbers with which they were launched.
struct ShrinkRecord {
  // Optimizer steps done: the next one is the one that broke, or with `goes_back` the first after the newest checkpoint.
  int64_t step = 0;
  std::vector<int> lost = {};  // ascending
  // Of what error feedback still had to send of each lost rank's gradients after these steps, which is gone: L2 norms.
  std::vector<double> lost_residual_norms = {};
  std::vector<int> ranks = {};  // who goes on; rank r of the group is ranks[r] from here on
  int64_t global_batch = 0;     // images per step from here on
  double lr = 0;                // peak, from here on
  double seconds = 0;      // from rank 0's error until this record, when all are ready to repeat the step
  std::string why = {};    // that error
  bool goes_back = false;  // to the newest checkpoint (--shard), or without one to the run's beginning
};

// --elastic: new ranks take part. They have the numbers that follow all that there have been.
struct GrowRecord {
  int64_t step = 0;  // optimizer steps done: the next one is the first with them
  std::vector<int> joined = {};
  std::vector<int> ranks = {};  // all that there are now; rank r of the group is ranks[r] from here on
  int64_t global_batch = 0;     // images per step from here on
  double lr = 0;                // peak, from here on
  double seconds = 0;           // from the end of the last step without them until all are ready for the next
};

// How long ranks have waited for each other so far, about once a second. Not on CUDA, where it is not measured.
struct WaitRecord {
  int64_t step = 0;    // optimizer steps done
  double seconds = 0;  // since the first step of this process
  // waited_s[r][p]: how long rank r has waited for data of rank p, in seconds, transfers included.
  std::vector<std::vector<double>> waited_s = {};
};

// After the last step and evaluation. All ranks' parameters have this hash; otherwise the run fails.
struct EndRecord {
  uint64_t parameter_hash = 0;
  // As in WaitRecord, over the whole run; empty where that is not measured, and for one rank.
  std::vector<std::vector<double>> waited_s = {};
  // The most that rank 0 has held in its device's memory at a time, in bytes: weights, activations, gradients, moments,
  // residuals and buffers. With several ranks on one device, their mean.
  int64_t memory_bytes = 0;
};

// Called by rank 0 only, one call at a time, in order. Steps may be reported late, because the host does not
// wait for them, but always before the next evaluation. An observer that throws ends the run.
class RunObserver {
 public:
  virtual ~RunObserver() = default;
  virtual void on_run(const RunInfo&) {}
  virtual void on_step(const StepRecord&) {}
  virtual void on_waits(const WaitRecord&) {}
  virtual void on_shrink(const ShrinkRecord&) {}
  virtual void on_grow(const GrowRecord&) {}
  virtual void on_eval(const EvalRecord&) {}
  virtual void on_checkpoint(const CheckpointRecord&) {}
  virtual void on_end(const EndRecord&) {}
};

// Trains from fresh weights, a file of weights (config.init) or a checkpoint (config.resume), on
// config.ranks() ranks, a thread each, and returns after reporting the last evaluation. Throws what the first
// failing rank threw; all other ranks have stopped by then. Same config, same bits.
void run_training(const TrainConfig& config, const DataSplits& data, RunObserver& observer);

// The same for ranks that are processes; this one is comm.rank(). Every process must pass the same config,
// which is checked. Returns when all ranks are done, with the same bits as ranks in one process; throws on
// every rank when one fails. With config.elastic, `comm` must be shrinkable, and `observer` is called by the rank
// that is rank 0 at the time.
void run_training(const TrainConfig& config, const DataSplits& data, RunObserver& observer,
                  Communicator& comm);

// A process that takes part in a run which others have begun with config.elastic, and in the settings `config` with as
// many ranks as they were launched with. `knock` blocks until they let this process in, which describes its settings and
// data to them as given: Communicator::join_tcp(). Returns and throws as above; BadInput if they refuse.
void join_training(const TrainConfig& config, const DataSplits& data, RunObserver& observer,
                   const std::function<std::unique_ptr<Communicator>(const std::string& about)>& knock);

}  // namespace gradwire
