// The training loop's contract: what goes in, and what it tells while it runs.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "trainer/config/config.h"

namespace gradwire {

class Communicator;  // collectives/communicator/communicator.h
struct DataSplits;   // trainer/data/dataset.h

// Known once the model and the reducer stand, before the first step.
struct RunInfo {
  int64_t parameters = 0;
  int64_t tensors = 0;
  int buckets = 0;                  // 0 in a world of 1
  std::string schedule;             // the one in use: "ring", "two_shot", ...; "none" in a world of 1
  std::string schedule_reason;      // Reducer::schedule_reason()
  std::string reducer;              // Reducer::describe()
  int64_t reducer_extra_bytes = 0;  // device memory per rank for residuals, factors and staging
  double peak_tflops = std::numeric_limits<double>::quiet_NaN();  // measured; NaN: not (measure/peaks.h)
  double copy_gb_per_s = std::numeric_limits<double>::quiet_NaN();
  double fma_share = std::numeric_limits<double>::quiet_NaN();
  std::string slow_products;  // a warning, or empty
  std::string products;       // what computes them on the host (measure/products.h); empty: a GPU
  int64_t first_step = 0;     // 0, or what the checkpoint had done that the run goes on from
};

// One optimizer step, as seen by rank 0. A time that was not measured is NaN.
struct StepRecord {
  int64_t step = 0;          // from 0
  int64_t epoch = 0;         // from 0, of the step's first image
  double loss = 0;           // mean over the global batch, before the update
  double lr = 0;             // used in this update
  double step_ms = 0;        // from the start of this step to the start of the next
  double images_per_s = 0;   // over all ranks: global batch / step_ms
  uint64_t wire_bytes = 0;   // sent by rank 0, measured at the transport
  uint64_t dense_bytes = 0;  // what it would have sent in FP32 with the same schedule
  double comm_ms = 0;        // on the reducer's stream, compression included
  double compress_ms = 0, communicate_ms = 0, decompress_ms = 0;  // its parts (collectives/program/phases.h)
  double exposed_comm_ms = 0;  // how long the optimizer waited for communication
  double data_ms = 0;          // how long the device stood still because the batch was not there
  double forward_ms = 0;
  double backward_ms = 0;
  double optimizer_ms = 0;
  double tflops = 0;  // of rank 0's device: the products of all ranks on it, over step_ms
};

// The whole test set, over all ranks.
struct EvalRecord {
  int64_t step = 0;  // optimizer steps done
  double epoch = 0;  // passes over the training set done
  double test_loss = 0;
  double test_accuracy = 0;  // 0 to 1
  int64_t images = 0;
};

// A checkpoint that is complete, on the disk, in its place.
struct CheckpointRecord {
  int64_t step = 0;    // optimizer steps done
  std::string path;    // of its folder
  uint64_t bytes = 0;  // of rank 0's files
  double save_ms = 0;  // from the end of the step to the end of the writing
};

// After the last step and evaluation. All ranks' parameters have this hash; had they differed, the run would
// have failed.
struct EndRecord {
  uint64_t parameter_hash = 0;
};

// Called by rank 0 alone, one call at a time, in order; steps may be reported late (the host need not wait
// for them) but each before the evaluation that follows it. An observer that throws ends the run.
class RunObserver {
 public:
  virtual ~RunObserver() = default;
  virtual void on_run(const RunInfo&) {}
  virtual void on_step(const StepRecord&) {}
  virtual void on_eval(const EvalRecord&) {}
  virtual void on_checkpoint(const CheckpointRecord&) {}
  virtual void on_end(const EndRecord&) {}
};

// Trains from fresh weights, from a file of them (config.init) or from a checkpoint (config.resume), on
// config.ranks() ranks, a thread each, and returns when the last evaluation is reported. Throws what the
// first failing rank threw; all other ranks have stopped by then. Same config, same bits.
void run_training(const TrainConfig& config, const DataSplits& data, RunObserver& observer);

// The same where ranks are processes: this one is comm.rank(). Every process passes the same config, which is
// checked. Returns when all ranks are done, with the same bits as ranks in one process; throws on every rank
// when one fails.
void run_training(const TrainConfig& config, const DataSplits& data, RunObserver& observer,
                  Communicator& comm);

}  // namespace gradwire
