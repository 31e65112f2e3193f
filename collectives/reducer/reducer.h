// Averages gradients over the ranks as they become ready, overlapped with backward.
//
// Parameters are registered once, in the order in which backward produces their gradients. The reducer owns
// one flat gradient buffer in that order, cut into buckets of about bucket_bytes at tensor boundaries. A
// tensor's gradient is a view into the buffer, so there are no copies. adopt() reduces gradients in the
// caller's memory. When the last gradient of a bucket is ready, the bucket is compressed and reduced on the
// reducer's stream, while the producer's stream continues with backward. Buckets alternate between two such
// streams, so that a bucket is encoded or decoded while another bucket is in transfer. Exchanges have the
// same order on every rank: bucket order, unless launch_in() sets another order.
//
// In a world of 1 there are no buckets and no residuals, and ready() and wait() do nothing, except with Dion.
//
// One step: for each tensor, in any order, write gradient(i) on stream s and call ready(i, s); then call
// wait(s) and run the optimizer on s. The host never blocks in ready() or wait().
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collectives/codec/pipeline.h"
#include "collectives/communicator/communicator.h"
#include "collectives/reducer/buckets.h"
#include "collectives/reducer/report.h"
#include "collectives/spec/spec.h"
#include "runtime/device/device.h"

namespace gradwire {

struct ReducerOptions {
  // A name that distinguishes reducers that share a communicator. Ranks compare the name in every call.
  std::string name = {};
  int64_t bucket_bytes = 25 << 20;
  bool average = true;  // divide the sum by the world size
  bool timing = true;   // off: records no times
  uint64_t seed = 0;    // for stochastic rounding; each rank's draws differ
  // Alignment in elements: each tensor's offset in its bucket is a multiple of `alignment`. 4 aligns every
  // gradient to 16 bytes and sends few bytes for gaps; 1 is the dense layout of other frameworks' buckets.
  int64_t alignment = 4;
  // Messages are sent in slices of about this many bytes, so that adding up one slice overlaps with sending
  // another. 0: no slicing; kAutomaticSlices: chosen by SchedulePlanner. Does not change results.
  int64_t slice_bytes = kAutomaticSlices;
  // Off: no flat buffer; adopt() sets the gradients' addresses before the first ready().
  bool own_gradients = true;
  // The reducer's stream; empty: the reducer creates its stream. Reducers that use one communicator
  // concurrently must share a stream, so that all ranks run their exchanges in the order in which they were
  // enqueued.
  Stream stream = {};
  // Whether each rank needs only the mean of its part (see owned()). A wire format then uses a
  // reduce-scatter, which sends half of an allreduce's bytes; other codecs leave the mean on every rank.
  bool sharded = false;
  bool single_waits = false;  // required by wait_for()
  // Whether a tensor whose gradient is zero on all ranks counts as unused in this step: its gradient becomes
  // zero, and its state stays. wait() then treats gradients that are not ready as zero. Each bucket exchanges
  // a float per tensor more. On CUDA the host waits for each bucket.
  bool skip_unused = false;
  // Receives each exchange of the steps it traces; must outlive the reducer. Needs `timing`.
  Tracer* tracer = nullptr;
  // Constructs the codec of each bucket, without the spec's policies; empty: as the spec says.
  std::function<std::unique_ptr<Codec>(const BucketContext&)> make_codec = {};
};

class Reducer {
 public:
  // Creates a reducer. Collective: every rank passes the same tensors, spec and options. `comm` must outlive
  // the reducer.
  Reducer(Communicator& comm, const CompressionSpec& spec, std::vector<GradientTensor> tensors,
          ReducerOptions options);
  ~Reducer();
  Reducer(const Reducer&) = delete;

  int tensors() const { return static_cast<int>(tensors_.size()); }
  // Returns the address of tensor i's gradient, shaped as registered; constant until adopt() changes it.
  float* gradient(int i) const;
  // Return the flat buffer of all gradients, and the offset of tensor i in this buffer, in elements. Gaps
  // between tensors (alignment) are always zero, so an optimizer may process the whole buffer at once.
  const Buffer& gradients() const { return gradients_; }
  int64_t offset(int i) const { return layout_.offsets.at(i); }
  int64_t elements() const { return layout_.elements; }  // size of the flat buffer, including gaps
  // Returns the elements of the flat buffer that hold the mean after wait(): all of them or, if sharded, this
  // rank's shard of each bucket. The rest of a sharded reducer's gradients is then unspecified.
  std::vector<ElementRange> owned() const;
  // Returns the buckets' ranges, the same on every rank. The range of bucket b in owned() begins at
  // ranges()[b].begin plus the sizes of the lower ranks' shards.
  const std::vector<BucketRange>& ranges() const { return layout_.buckets; }
  int bucket_of(int tensor) const;
  Shards shards(const BucketRange& bucket) const;

  // Moves tensor i's gradient to gradients[i], on the communicator's device, from the next step on. A bucket
  // is reduced in place if its tensors have the same layout there as in the flat buffer, without a gap after
  // the last tensor (an alignment of 1 leaves no gaps). Any other bucket, and any bucket with 16-bit
  // gradients, is copied into a buffer when it is full and out of it after the reduction. That buffer is the
  // flat buffer or, without own_gradients, one of one or two buffers that buckets use in turn. If sharded,
  // only the owned() part is copied out. May be called only between steps. Compares one address per tensor if
  // no address has changed; otherwise blocks until work in flight, which uses the old addresses, is done.
  void adopt(std::span<void* const> gradients);
  // Returns how many of buckets() are reduced in place, without a copy.
  int buckets_in_place() const;

  // Marks tensor i's gradient as complete at this point of `producer`. Must be called once per tensor and
  // step.
  void ready(int i, const Stream& producer);
  // Makes later work on `consumer` see averaged gradients. Throws BadInput that names the tensors that were
  // not ready.
  void wait(const Stream& consumer);
  // Makes later work on `consumer` see this bucket's averaged gradients. Every gradient must be ready. The
  // step still ends with wait(). Needs options.single_waits.
  void wait_for(int bucket, const Stream& consumer);
  // Sets the order in which buckets are exchanged from the next step on: a permutation, the same on every
  // rank. A full bucket waits for the buckets that precede it in this order. May be called between steps, or
  // when every gradient of a step is ready.
  void launch_in(std::vector<int> order);

  // Return the first step that can be captured in a graph (runtime/device/graph.h), and the period of steps.
  // From step steady_from() on, ready() and wait() enqueue the same work in each step. A graph that was
  // captured and launched in one step can be launched in place of a later step's calls. replayed() must be
  // called after each such launch, with the step in which the graph was captured. The stats of the captured
  // step are then the stats of the later step. Steps repeat with period(), so a graph can replace only steps
  // with the same remainder: with a period of 2, a graph captured in an even step can replace even steps.
  int64_t steady_from() const;
  int64_t period() const;
  void replayed(int64_t captured);

  // Returns the number of steps begun: calls of wait() and replayed(), plus the steps given to resume_at().
  int64_t steps() const { return step_; }
  // Continues after `steps` steps, with a checkpoint's tensor_state(). May be called only between steps.
  void resume_at(int64_t steps);
  // Returns the statistics of step `step`, counted from 0, which must be one of the last kStatsKept. The
  // consumer stream must have passed its wait() (synchronize it, or an event recorded after it). All zero in
  // a world of 1.
  ReducerStats stats(int64_t step) const;
  static constexpr int kStatsKept = 8;
  // Adds the step's phases of every bucket and their exchanges to the trace. Requirements as for stats().
  void trace(int64_t step, Tracer& tracer) const;

  // Returns the state for checkpoints: the residuals and the codecs' other state, by tensor and thus
  // independent of the bucket size. In tensor order; the same for the same tensors, spec and options.
  std::vector<TensorState> tensor_state() const;
  int buckets() const { return static_cast<int>(buckets_.size()); }
  // Returns the schedule in use, e.g. "two_shot", or "two_shot+ring" if allreduces differ; "none" in a world
  // of 1.
  std::string schedule() const;
  // Returns the reason for the schedule: the predictions of schedule=auto for the largest bucket, and the
  // link costs.
  std::string schedule_reason() const;
  ReducerMemory memory() const;
  int64_t extra_bytes() const { return memory().total(); }
  // Returns one line per bucket: tensors, bytes, compression, schedule, and the reason for the schedule.
  std::string describe() const;

 private:
  struct Bucket : BucketRange {
    std::unique_ptr<BucketPipeline> pipeline;
    float* data = nullptr;  // the pipeline's data: the reducer's memory, or adopted
    bool staged = false;    // tensors are copied into and out of the reducer's memory
    // Gaps that another user of the memory may have written, as offsets from the bucket's start.
    std::vector<ElementRange> gaps;
    ElementRange owned;  // range that this rank owns, as offsets from the bucket's start
    size_t lane = 0;
    Event reduced;  // end of the reduction; only with single_waits

    // The current step.
    int ready = 0;
    std::vector<Stream> producers;
  };
  // A stream that processes buckets one after another.
  struct Lane {
    Stream stream = {};
    size_t workspace_bytes = 0;
    Buffer workspace = {};
    Buffer staging = {};  // without own_gradients: for adopted gradients not reduced in place
    Event joined = {};    // end of the step on this lane; the first lane waits for this event
    bool behind = true;   // has not waited yet for the end of the previous step on all lanes
  };

  // reducer.cpp: construction.
  void build_buckets();
  void describe_memory();
  // step.cpp: a bucket's step.
  void check_ready() const;
  void launch(int position);  // an index into order_
  void count_bytes(StepMarks& marks, int which);
  // Gradients in the caller's memory.
  float* common_base(const Bucket& bucket) const;
  void stage(const Bucket& bucket, bool in);
  // report.cpp: statistics and descriptions.
  const StepMarks& marks_of(int64_t step) const;
  std::string links_text() const;

  Communicator& comm_;
  const CompressionSpec spec_;
  const std::vector<GradientTensor> tensors_;
  const ReducerOptions options_;
  const GradientLayout layout_;
  Buffer gradients_, device_step_;
  std::vector<void*> adopted_;   // [tensor]; empty: gradients are in gradients_
  std::vector<Bucket> buckets_;  // empty in a world of 1
  std::vector<int> bucket_of_;   // tensor -> bucket
  std::vector<int> order_;       // order of the buckets' exchanges
  std::optional<SchedulePlanner> planner_, scatter_planner_;
  uint64_t dense_bytes_ = 0;
  std::array<StepMarks, kStatsKept> marks_;
  Event full_, begun_, done_;

  std::mutex mutex_;  // ready() may be called from several threads
  std::vector<bool> ready_;
  int launched_ = 0;  // buckets of the current step already enqueued
  int64_t step_ = 0, first_step_ = 0;
  // Last members: destroyed before all memory that their tasks use.
  std::vector<Lane> lanes_;  // buckets alternate between them; the first uses stream_
  Stream stream_;
};

}  // namespace gradwire
