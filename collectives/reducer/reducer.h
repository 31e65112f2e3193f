// The reducer averages gradients over the ranks as they become ready, overlapped with backward.
//
// Parameters are registered once, in the order in which backward produces their gradients. The reducer owns
// one flat gradient buffer in that order, cut into buckets of about bucket_bytes at tensor boundaries; a
// tensor's gradient is a view into it, so nothing is copied in or out. To reduce gradients in the caller's
// own memory, see adopt(). When the last gradient of a bucket is ready, the bucket is compressed and reduced
// on the reducer's own stream, while the producer's stream continues with backward. Buckets alternate between
// two such streams, so that one is encoded or decoded while another is in transfer; exchanges are made in
// one order on every rank, bucket order unless launch_in() says otherwise.
//
// In a world of 1 ready() and wait() do nothing: no stream, no residual, no bucket.
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

#include "collectives/codec/codec.h"
#include "collectives/communicator/communicator.h"
#include "collectives/reducer/buckets.h"
#include "collectives/reducer/statistics.h"
#include "collectives/spec/spec.h"
#include "runtime/device.h"

namespace gradwire {

struct ReducerOptions {
  // Distinguishes reducers that share a communicator: part of every call and of what ranks compare.
  std::string name = {};
  int64_t bucket_bytes = 25 << 20;
  bool average = true;  // divide the sum by the world size
  bool timing = true;   // off: no times are recorded
  uint64_t seed = 0;    // for stochastic rounding; each rank's draws differ
  // In elements; tensors begin at multiples of it in a bucket. 4 makes every gradient 16-byte aligned and
  // wastes little of the wire on gaps; 1 is the layout of frameworks that pack their buckets densely.
  int64_t alignment = 4;
  // Messages are sent in slices of about this many bytes, so that adding up one slice overlaps with sending
  // another; 0: no slicing; kAutomaticSlices: chosen from the cost of the links. Results do not depend on it.
  int64_t slice_bytes = kAutomaticSlices;
  // Off: no flat buffer; adopt() gives the gradients' addresses, before the first ready().
  bool own_gradients = true;
  // Off: adopted gradients are always copied in and out of the flat buffer, even if they have its layout.
  bool in_place = true;
  // The stream the reducer works on; empty: one of its own. Reducers that use one communicator at the same
  // time must share a stream, so that all ranks run their exchanges in the order in which they were enqueued.
  Stream stream = {};
  // Each rank needs the mean of its own part only: see owned(). Then a wire format ends with a reduce-scatter,
  // half an allreduce; other codecs leave the mean on every rank.
  bool sharded = false;
  // If sharded: memory for the gradients of this many buckets, which take turns; 0: for all. The mean of this rank's
  // part is then in shard(), and gradients must become ready in the order of the tensors.
  int slots = 0;
  // The first tensors of blocks, which buckets do not cut; empty: any tensor may begin a bucket. With slots, an op that
  // writes several gradients must not write those of two blocks.
  std::vector<int> blocks = {};
  bool single_waits = false;  // wait_for() is used
  // Receives each exchange in the steps that it traces; must outlive the reducer. Needs `timing`.
  Tracer* tracer = nullptr;
  // Constructs the codec of each bucket; empty: the one that the spec names.
  std::function<std::unique_ptr<Codec>(const BucketContext&)> make_codec = {};
};

class Reducer {
 public:
  // Collective: every rank passes the same tensors, spec and options. `comm` must outlive the reducer.
  Reducer(Communicator& comm, const CompressionSpec& spec, std::vector<GradientTensor> tensors,
          ReducerOptions options);
  ~Reducer();
  Reducer(const Reducer&) = delete;

  int tensors() const { return static_cast<int>(tensors_.size()); }
  // The address of tensor i's gradient, shaped as registered; constant until adopt() changes it.
  float* gradient(int i) const;
  // The flat buffer that holds all gradients, and the offset of tensor i in it, in elements. Gaps between
  // tensors (alignment) are and stay zero, so an optimizer may process the whole buffer at once. With slots there is
  // room for these only, and gradient(i) may be written once the gradients of all earlier buckets are ready.
  const Buffer& gradients() const { return gradients_; }
  int64_t offset(int i) const { return layout_.offsets.at(i); }
  int64_t elements() const { return layout_.elements; }  // of the flat buffer, gaps included
  // Elements of the flat buffer in which this rank finds the mean after wait(): all of them or, if sharded, its
  // shard of each bucket. The rest of a sharded reducer's gradients is then unspecified.
  std::vector<ElementRange> owned() const;
  // With slots: the mean of owned(), one range after another, from wait() until the next step. Else empty.
  const Buffer& shard() const { return shard_; }
  // The same of every rank, by bucket: owned() is ranges()[b].begin plus the shards of the ranks before.
  const std::vector<BucketRange>& ranges() const { return layout_.buckets; }
  int bucket_of(int tensor) const;
  int64_t largest_bucket() const;  // elements
  Shards shards(const BucketRange& bucket) const;

  // From the next step on, tensor i's gradient is at gradients[i], on the communicator's device. A bucket
  // whose tensors have the same layout there as in the flat buffer, with no gap after the last (always so
  // with an alignment of 1), is reduced in place; the tensors of any other bucket, and of those with 16-bit gradients,
  // are copied into a buffer when the bucket is full, and out of it after the reduction: into the flat one or, without
  // own_gradients, into one or two that buckets use in turn. If sharded, only the owned() part is copied out. Only
  // between steps. Costs a comparison per tensor if nothing has moved; otherwise blocks until work in flight, which
  // uses the old addresses, is done.
  void adopt(std::span<void* const> gradients);
  // How many of buckets() are reduced in place, without a copy.
  int buckets_in_place() const;

  // Tensor i's gradient is complete at this point of `producer`. Each tensor once per step.
  void ready(int i, const Stream& producer);
  // Later work on `consumer` sees averaged gradients. Throws BadInput naming the tensors that were not ready.
  void wait(const Stream& consumer);
  // Later work on `consumer` sees the averaged gradients of this bucket; every gradient must be ready. The step still
  // ends with wait(). Needs options.single_waits.
  void wait_for(int bucket, const Stream& consumer);
  // Exchanges buckets in this order from the next step on, a permutation that is the same on every rank. A bucket that
  // is full waits for those before it. Between steps, or when every gradient of a step is ready. Not with slots.
  void launch_in(std::vector<int> order);

  // A step can be captured in a graph (runtime/graph.h): from step steady_from() on, ready() and wait()
  // enqueue the same work in each step. Once a graph is captured and has been launched in its own step, it
  // can be launched in place of the calls of a later step; call replayed() after each such launch, with the
  // step in which the graph was captured. The stats of that step are then those of the later one.
  // Only every period()-th step is the same, so a graph can replace steps of its own turn: with a period of 2,
  // one captured in an even step can replace even steps.
  int64_t steady_from() const;
  int64_t period() const;
  void replayed(int64_t captured);

  // Steps begun: the number of calls of wait() and replayed(), plus the steps given to resume_at().
  int64_t steps() const { return step_; }
  // Continues after `steps` steps: a checkpoint restores this and tensor_state(). Only between steps.
  void resume_at(int64_t steps);
  // Statistics of step `step`, counted from 0, which must be one of the last kStatsKept. The consumer stream
  // must have passed its wait() (synchronize it, or an event recorded after it). In a world of 1 all zero.
  ReducerStats stats(int64_t step) const;
  static constexpr int kStatsKept = 8;
  // Adds that step's phases of every bucket, and their exchanges, to the trace. Conditions as for stats().
  void trace(int64_t step, Tracer& tracer) const;

  // What a checkpoint must hold: the residuals and the codecs' other state. By tensor, so that it does not
  // depend on the bucket size. In the order of the tensors; the same for the same tensors, spec and options.
  std::vector<TensorState> tensor_state() const;
  int buckets() const { return static_cast<int>(buckets_.size()); }
  // The schedule in use, e.g. "two_shot", or "two_shot+ring" when allreduces differ; "none" in a world of 1.
  std::string schedule() const;
  // The reason: what schedule=auto predicted for the largest bucket, and from which link costs.
  std::string schedule_reason() const;
  ReducerMemory memory() const;
  int64_t extra_bytes() const { return memory().total(); }
  // One line per bucket: tensors, bytes, how each is compressed, schedule and why.
  std::string describe() const;

 private:
  struct Bucket : BucketRange {
    std::unique_ptr<Codec> codec;
    float* data = nullptr;           // what the codec works on: the reducer's memory, or adopted
    bool staged = false;             // tensors are copied into the reducer's memory and out of it
    std::vector<ElementRange> gaps;  // where memory's last user may have had others; from the bucket's start
    ElementRange owned;              // by this rank, from the bucket's start
    int64_t packed = 0;              // with slots: where that is in shard_
    size_t lane = 0;
    Event reduced;  // with single_waits

    // In the current step.
    int ready = 0;
    std::vector<Stream> producers;
    bool is_full() const { return ready == tensors(); }
  };
  // A stream that processes buckets one after the other.
  struct Lane {
    Stream stream = {};
    size_t workspace_bytes = 0;
    Buffer workspace = {};
    Buffer staging = {};  // without own_gradients: for adopted gradients that are not reduced in place
    Event joined = {};    // end of the step, for the first lane to wait on
    bool behind = true;   // has not waited for the end of the whole previous step yet
  };
  Lane& lane_of(const Bucket& b) { return lanes_[b.lane]; }
  const Lane& lane_of(const Bucket& b) const { return lanes_[b.lane]; }

  // reducer.cpp: construction.
  void build_lanes();
  void build_buckets();
  double bytes_per_element(const BucketRange& bucket) const;
  void describe_memory();
  // step.cpp: a bucket's step.
  void check_ready() const;
  void launch(int position);  // in order_
  void count_bytes(StepMarks& marks, int which);
  // slots.cpp: memory for some buckets only.
  bool in_turns() const { return options_.sharded && options_.slots > 0 && comm_.world() > 1; }
  size_t slots() const;
  int64_t gradient_elements() const;
  float* memory_of(size_t bucket) const;
  void build_slots();
  void take(const Bucket& bucket, Event& taken);
  // staging.cpp: gradients in the caller's memory.
  float* staging_of(const Bucket& bucket);
  void clear_gaps(const Bucket& bucket) const;
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
  Buffer shard_;                 // with slots
  std::vector<Event> taken_;     // by slot: its gradients have been reduced, and the mean is in shard_
  std::vector<void*> adopted_;   // by tensor; empty: the gradients are in gradients_
  std::vector<Bucket> buckets_;  // empty in a world of 1
  std::vector<int> bucket_of_;   // tensor -> bucket
  std::vector<int> order_;       // of the buckets' exchanges
  std::optional<SchedulePlanner> planner_, scatter_planner_;
  uint64_t dense_bytes_ = 0;
  std::array<StepMarks, kStatsKept> marks_;
  Event full_, begun_, done_;

  std::mutex mutex_;  // ready() may be called from several threads
  std::vector<bool> ready_;
  int launched_ = 0;  // buckets of the current step whose work is enqueued
  int64_t step_ = 0, first_step_ = 0;
  // Last: destroyed first, before anything their tasks use.
  std::vector<Lane> lanes_;  // buckets alternate between them; the first uses stream_
  Stream stream_;
};

}  // namespace gradwire
