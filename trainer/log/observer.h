// The records of a run, and the observer that receives them.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace gradwire {

// The properties of a run that are known before the first step, once the model and the reducer exist.
struct RunInfo {
  int64_t parameters = 0;
  int64_t tensors = 0;
  int buckets = 0;                  // number of buckets; 0 with one rank
  std::string schedule;             // "ring", "two_shot", ...; "none" with one rank
  std::string schedule_reason;      // Reducer::schedule_reason()
  std::string reducer;              // Reducer::describe()
  int64_t reducer_extra_bytes = 0;  // device memory per rank for residuals, factors and staging
  double peak_tflops = std::numeric_limits<double>::quiet_NaN();  // NaN: not measured (measure/peaks.h)
  double copy_gb_per_s = std::numeric_limits<double>::quiet_NaN();
  double fma_share = std::numeric_limits<double>::quiet_NaN();
  std::string slow_products;  // a warning, or empty
  std::string products;       // the host's BLAS (measure/peaks.h); empty on a GPU
  int64_t first_step = 0;     // steps done by the checkpoint that the run resumes from
  // --elastic: a GroupRecord follows. Either this rank reports from first_step on, in place of a lost rank.
  // Or this rank's reports of steps after first_step are void, because the run returns to first_step.
  bool takes_over = false;
};

// The measurements of a step on rank 0. Times that were not measured are NaN.
struct StepValues {
  double step_ms = 0;       // from the start of this step to the start of the next
  double images_per_s = 0;  // over all ranks: global batch / step_ms
  double wire_bytes = 0;    // sent by rank 0, measured at the transport
  double dense_bytes = 0;   // bytes of the same schedule in FP32
  double comm_ms = 0;       // time on the reducer's stream, compression included
  double compress_ms = 0, communicate_ms = 0,
         decompress_ms = 0;    // parts of comm_ms (collectives/program/program.h), in ms
  double exposed_comm_ms = 0;  // time for which the optimizer waited for communication
  double data_ms = 0;          // time for which the device waited for the batch
  double forward_ms = 0;
  double backward_ms = 0;
  double optimizer_ms = 0;
  double tflops = 0;  // FLOPs of the products of all ranks on rank 0's device / step time
};

// The measurements in the order of the records. The records, the summary and `gradwire compare` follow this
// table.
struct StepField {
  const char* key;
  double StepValues::*value;
  bool whole = false;  // an integer in a step's record
};
inline constexpr StepField kStepFields[] = {{"step_ms", &StepValues::step_ms},
                                            {"images_per_s", &StepValues::images_per_s},
                                            {"wire_bytes", &StepValues::wire_bytes, true},
                                            {"dense_bytes", &StepValues::dense_bytes, true},
                                            {"comm_ms", &StepValues::comm_ms},
                                            {"compress_ms", &StepValues::compress_ms},
                                            {"communicate_ms", &StepValues::communicate_ms},
                                            {"decompress_ms", &StepValues::decompress_ms},
                                            {"exposed_comm_ms", &StepValues::exposed_comm_ms},
                                            {"data_ms", &StepValues::data_ms},
                                            {"forward_ms", &StepValues::forward_ms},
                                            {"backward_ms", &StepValues::backward_ms},
                                            {"optimizer_ms", &StepValues::optimizer_ms},
                                            {"tflops", &StepValues::tflops}};

// One optimizer step on rank 0.
struct StepRecord : StepValues {
  int64_t step = 0;   // counted from 0
  int64_t epoch = 0;  // epoch of the step's first image, counted from 0
  double loss = 0;    // mean over the global batch, before the update
  double lr = 0;      // learning rate of this update
};

// The parts of a step on rank 0, in ms. `kernels_ms`: a codec's kernels outside exchanges. `links_ms`:
// exchanges and the sums between them.
struct StepParts {
  double compute_ms = 0;  // forward and backward
  double kernels_ms = 0, links_ms = 0, exposed_ms = 0, optimizer_ms = 0, step_ms = 0;
};
// The parts with their keys, their names in tables, and the measurements whose sum they are.
struct StepPart {
  const char *key, *name;
  double StepParts::*value;
  double StepValues::*first, StepValues::*second = nullptr;

  double of(const StepValues& step) const { return step.*first + (second != nullptr ? step.*second : 0); }
};
inline constexpr StepPart kStepParts[] = {
    {"compute_ms", "compute", &StepParts::compute_ms, &StepValues::forward_ms, &StepValues::backward_ms},
    {"kernels_ms", "kernels", &StepParts::kernels_ms, &StepValues::compress_ms, &StepValues::decompress_ms},
    {"links_ms", "links and sums", &StepParts::links_ms, &StepValues::communicate_ms},
    {"exposed_ms", "exposed", &StepParts::exposed_ms, &StepValues::exposed_comm_ms},
    {"optimizer_ms", "optimizer", &StepParts::optimizer_ms, &StepValues::optimizer_ms},
    {"step_ms", "step", &StepParts::step_ms, &StepValues::step_ms}};

// --compression auto: the parts as predicted (trainer/measure/recommend.h), and the limits between which
// step_ms lies with a probability of 90 %.
struct PredictedStep {
  StepParts parts = {};
  double low_ms = 0, high_ms = 0;

  bool holds(double step_ms) const { return low_ms <= step_ms && step_ms <= high_ms; }
};

// An evaluation of the whole test set on all ranks.
struct EvalRecord {
  int64_t step = 0;    // optimizer steps done
  double epoch = 0;    // passes over the training set
  double seconds = 0;  // training time of this process's steps, without evaluations
  double test_loss = 0;
  double test_accuracy = 0;  // fraction from 0 to 1
  int64_t images = 0;
};

// A complete checkpoint on disk.
struct CheckpointRecord {
  int64_t step = 0;    // optimizer steps done
  std::string path;    // the checkpoint's folder
  uint64_t bytes = 0;  // size of rank 0's files
  double save_ms = 0;  // from the end of the step to the end of writing
};

// --elastic: the run continues with other ranks: without some that were lost, or with new ones. Ranks are
// identified by their numbers at launch; new ranks get the next unused numbers.
struct GroupRecord {
  // Optimizer steps done. After a failure, the next step is the interrupted step or, with `goes_back`, the
  // first step after the newest checkpoint.
  int64_t step = 0;
  std::vector<int> joined = {};  // if not empty, ranks have joined; otherwise the group has failed
  std::vector<int> lost = {};    // ascending; may be empty
  // L2 norm of the residual of each lost rank after these steps. The run continues without these residuals.
  std::vector<double> lost_residual_norms = {};
  std::vector<int> ranks = {};  // all current ranks; afterwards rank r of the group is ranks[r]
  int64_t global_batch = 0;     // images per step afterwards
  double lr = 0;                // peak rate afterwards
  // From rank 0's error, or the end of the last step without the new ranks, until all ranks are ready for the
  // next step.
  double seconds = 0;
  std::string why = {};    // rank 0's error
  bool goes_back = false;  // --shard: the run returns to the newest checkpoint, or to its start without one
};

// --compression auto: the run has measured again and continues with this plan, which may be the same.
struct ReplanRecord {
  int64_t step = 0;         // optimizer steps done; the next step is the first of the plan
  std::string why = {};     // the measurement that drifted
  std::string before = {};  // the flags of the earlier plan: "--compression int8 --bucket-mb 25"
  std::string after = {};
  double seconds = 0;  // from the end of the last step of the earlier plan to the start of the next step
  PredictedStep predicted = {};
  std::string choice = {};  // the record for the log, as JSON
  int buckets = 0;          // as in RunInfo
  std::string schedule = {};
};

// Times for which ranks have waited for each other so far, about once a second. Not measured on CUDA.
struct WaitRecord {
  int64_t step = 0;    // optimizer steps done
  double seconds = 0;  // since the first step of this process
  // waited_s[r][p]: seconds for which rank r has waited for data from rank p, transfers included.
  std::vector<std::vector<double>> waited_s = {};
};

// The end of a run, reported after the last step and evaluation.
struct EndRecord {
  uint64_t parameter_hash = 0;  // the same on all ranks; otherwise the run fails
  // As in WaitRecord, over the whole run. Empty if not measured, and with one rank.
  std::vector<std::vector<double>> waited_s = {};
  // Peak device memory of rank 0, in bytes: weights, activations, gradients, moments, residuals and buffers.
  // If several ranks share the device, the mean over these ranks.
  int64_t memory_bytes = 0;
};

// Receives the records of a run. Only rank 0 calls the observer, one call at a time, in order. The host does
// not wait for steps, so reports of steps may be late, but they precede the next evaluation. An exception
// from an observer ends the run.
class RunObserver {
 public:
  virtual ~RunObserver() = default;
  virtual void on_run(const RunInfo&) {}
  virtual void on_step(const StepRecord&) {}
  virtual void on_waits(const WaitRecord&) {}
  virtual void on_group(const GroupRecord&) {}
  virtual void on_replan(const ReplanRecord&) {}
  virtual void on_eval(const EvalRecord&) {}
  virtual void on_checkpoint(const CheckpointRecord&) {}
  virtual void on_end(const EndRecord&) {}
};

// The observers of a run, which receive each record in this order.
struct RunObservers {
  std::vector<RunObserver*> all;

  template <typename Record>
  void tell(void (RunObserver::*on)(const Record&), const Record& record) const {
    for (RunObserver* observer : all) (observer->*on)(record);
  }
};

}  // namespace gradwire
