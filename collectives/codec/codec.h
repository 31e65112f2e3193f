// A codec turns the gradients of one bucket into their average over the ranks, through few bytes.
//
// To add one: derive from Codec, build it in make_codec(), give it a name in the spec grammar (spec.h). The
// reducer, the trainer, the conservation and bit-identity tests and the benchmarks then pick it up through
// its spec string.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collectives/codec/tensor_state.h"
#include "collectives/plan/planner.h"
#include "collectives/program/program.h"
#include "collectives/schedule/schedule.h"
#include "collectives/spec/spec.h"
#include "collectives/transport/transport.h"

namespace gradwire {

// One tensor's place in a bucket.
struct BucketTensor {
  std::string name;
  int64_t rows = 0, cols = 0;  // as PowerSGD sees it: shape[0] x the rest; a vector has cols == 1
  int64_t offset = 0;          // of its first element, from the bucket's start
  int32_t index = 0;           // in the whole model
  int64_t count() const { return rows * cols; }
};

// What a spec asks of the planner.
inline ScheduleRequest schedule_request(const CompressionSpec& spec) {
  return {.kind = spec.schedule, .fp32_intra_node = spec.fp32_intra_node};
}

struct BucketContext {
  Transport* transport = nullptr;
  CompressionSpec spec;
  Schedule schedule;  // of every allreduce, unless there is a planner, who outlives this context only
  const SchedulePlanner* planner = nullptr;
  SchedulePlanner::Choice choose(int64_t count, Wire wire) const;
  Stream stream;  // for set-up work; a codec synchronizes it only in its constructor
  // For exchanges that overlap with kernels, and how much of a message is to be sent at a time (see
  // Program::Options). In order with the exchanges of the stream given to run().
  Stream transfers;
  int64_t slice_bytes = 0;
  bool beside_others = false;  // another bucket is under way meanwhile, on another stream
  std::vector<BucketTensor> tensors;
  float* gradients = nullptr;      // the bucket; null when rebind() comes before the first run()
  int64_t elements = 0;            // of the bucket, gaps between tensors included
  int64_t first_element = 0;       // of the bucket within the model's flat gradient
  float scale = 1.0f;              // 1 / world for the mean
  uint64_t rounding_seed = 0;      // differs between ranks
  const uint64_t* step = nullptr;  // steps done so far, in device memory
  std::string name;                // for error texts
};

// An allreduce that a codec does in each step, and its schedule.
struct PlannedAllreduce {
  std::string what;  // "" when it is the only one
  ScheduleKind schedule = ScheduleKind::ring;
  std::string reason;
};

class Codec {
 public:
  virtual ~Codec() = default;

  // Scratch shared with the other buckets of the same stream; bind() comes once, before the first run().
  virtual size_t workspace_bytes() const = 0;
  virtual void bind(void* workspace) = 0;
  // The bucket's gradients have moved, laid out as before. Only while nothing of this codec is in flight.
  virtual void rebind(float* gradients) = 0;
  // Enqueues one step on `stream`: bucket gradients in, averaged gradients out. `step` counts from 0.
  // `phases` is told what the work on `stream` is: kernels that make less of the bucket, exchanges, kernels
  // that make a bucket of it again.
  virtual void run(const Stream& stream, int64_t step, BucketPhases& phases) = 0;
  void run(const Stream& stream, int64_t step) {
    BucketPhases nobody;
    run(stream, step, nobody);
  }
  // From this step on run() enqueues the same whatever the step, so that it may be captured in a graph. What
  // still differs between steps then follows from BucketContext::step, on the device.
  virtual int64_t steady_from() const { return 0; }

  // What error feedback keeps, laid out as the bucket's gradients; null: nothing.
  virtual float* residual() { return nullptr; }
  // Whatever else outlives a step, by tensor (BucketTensor::index).
  virtual std::vector<TensorState> tensor_state() { return {}; }
  virtual int64_t state_bytes() const = 0;  // device memory beyond gradients and workspace
  virtual std::string describe() const = 0;
  virtual std::vector<PlannedAllreduce> plan() const = 0;
};

std::unique_ptr<Codec> make_codec(const BucketContext& context);

// The codec behind every wire format: one allreduce of the whole bucket.
std::unique_ptr<Codec> make_wire_codec(const BucketContext& context);
// The rank at which `powersgd` compresses a rows x cols tensor; 0: it stays dense. PyTorch's rule: worth it
// when the factors are spec.min_ratio times smaller than the matrix; vectors never.
int powersgd_rank(const CompressionSpec& spec, int64_t rows, int64_t cols);
// The codec behind `powersgd`.
std::unique_ptr<Codec> make_powersgd_codec(const BucketContext& context);

}  // namespace gradwire
