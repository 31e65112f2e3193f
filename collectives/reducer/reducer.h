// The reducer: what turns "this gradient is ready" into averaged gradients, overlapped with backward.
//
// Parameters are registered once, in the order in which backward produces their gradients. The reducer owns
// one flat gradient buffer in that order, cut into buckets of about bucket_bytes at tensor boundaries; a
// tensor's gradient is a view into it, so nothing is copied in or out. Gradients that somebody else owns are
// adopted: see adopt(). When the last gradient of a bucket is ready, the bucket is compressed and reduced on
// the reducer's own stream, while the producer's stream goes on with backward. Buckets take turns on two such
// streams, so that one is encoded or decoded while another is on the links; exchanges are made in the order
// of the buckets, on every rank.
//
// In a world of 1 ready() and wait() do nothing: no stream, no residual, no bucket.
//
// One step:   for each tensor, in any order: write gradient(i) on stream s; ready(i, s);   then wait(s);
// optimizer on s. The host never blocks in ready() or wait().
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
  // Told apart by it where several reducers share a communicator: part of every call and of what ranks compare.
  std::string name = {};
  int64_t bucket_bytes = 25 << 20;
  bool average = true;  // divide the sum by the world size
  // Where timings come from; off, nothing is recorded.
  bool timing = true;
  uint64_t seed = 0;  // of stochastic rounding; each rank's draws differ
  // Elements; tensors begin at multiples of it in a bucket. 4 makes every gradient 16-byte aligned and leaves
  // little of the wire to gaps; 1 is the layout of frameworks that pack their buckets densely.
  int64_t alignment = 4;
  // Messages are sent in slices of about this many bytes, so that adding up one slice overlaps with sending
  // another; 0: never sliced; kAutomaticSlices: as the links want them. No bit depends on it.
  int64_t slice_bytes = kAutomaticSlices;
  // Off: no flat buffer; adopt() says where the gradients are, before the first ready().
  bool own_gradients = true;
  // Off: adopted gradients are always copied into the flat buffer and out of it, even where they lie as in
  // it.
  bool in_place = true;
  // Where the reducer works; empty: on a stream of its own. Reducers that use one communicator at the same
  // time share a stream, so that all ranks run their exchanges in the order in which they were enqueued.
  Stream stream = {};
  // Who is told of each exchange in the steps that it traces; outlives the reducer. Null: nobody. Needs
  // `timing`.
  Tracer* tracer = nullptr;
  // Makes the codec of each bucket; empty: the one that the spec names.
  std::function<std::unique_ptr<Codec>(const BucketContext&)> make_codec = {};
};

class Reducer {
 public:
  // Collective: every rank passes the same tensors, spec and options. `comm` outlives the reducer.
  Reducer(Communicator& comm, const CompressionSpec& spec, std::vector<GradientTensor> tensors,
          ReducerOptions options);
  ~Reducer();
  Reducer(const Reducer&) = delete;

  int tensors() const { return static_cast<int>(tensors_.size()); }
  // Where tensor i's gradient lives, shape as registered; the same address until adopt() gives another.
  float* gradient(int i) const;
  // The flat buffer that all gradients are views of, and where tensor i begins in it, in elements. Gaps
  // between tensors (alignment) are zero and stay zero, so an optimizer may run over the whole buffer at
  // once.
  const Buffer& gradients() const { return gradients_; }
  int64_t offset(int i) const { return layout_.offsets.at(i); }
  int64_t elements() const { return layout_.elements; }  // of the flat buffer, gaps included

  // From the next step on, tensor i's gradient is at gradients[i], on the communicator's device. A bucket
  // whose tensors lie there as they do in the flat buffer, and that ends with its last tensor (always so with
  // an alignment of 1), is reduced in place; the tensors of any other bucket are copied into the flat buffer
  // when the bucket is full, and out of it after the reduction. Between steps only. Costs a comparison per
  // tensor when nothing has moved; otherwise blocks until work in flight, which uses the old addresses, is
  // done. Allocates the flat buffer when it is needed first.
  void adopt(std::span<float* const> gradients);
  // How many of buckets() are reduced where they are, without a copy.
  int buckets_in_place() const;

  // Tensor i's gradient is complete at this point of `producer`. Each tensor once per step.
  void ready(int i, const Stream& producer);
  // Later work on `consumer` sees averaged gradients. Throws Error naming the tensors that were not ready.
  void wait(const Stream& consumer);

  // A step may be captured in a graph (runtime/graph.h): its ready() and wait() then enqueue work that is the
  // same in each step from this one on. Once it is captured, and has been launched in its own step, the same
  // graph can be launched in place of the calls of a later step, which replayed() says after the launch;
  // `captured` is the step in which it was captured. The stats of that step are then those of the later one.
  int64_t steady_from() const;
  void replayed(int64_t captured);

  // Steps begun: how often wait() or replayed() was called, on top of what resume_at() said.
  int64_t steps() const { return step_; }
  // Goes on as after `steps` steps: together with tensor_state(), what a checkpoint restores. Between steps
  // only.
  void resume_at(int64_t steps);
  // Of step `step`, counted from 0: one of the last kStatsKept, whose wait() the consumer stream has passed
  // (synchronize it, or an event recorded after it). In a world of 1 all zero.
  ReducerStats stats(int64_t step) const;
  static constexpr int kStatsKept = 8;
  // Puts the phases of every bucket in that step, under the same conditions, and their exchanges into the
  // trace.
  void trace(int64_t step, Tracer& tracer) const;

  // What a checkpoint must hold, by tensor, so that it fits whatever the bucket size: the residuals and what
  // else codecs keep. In the order of the tensors, the same for the same tensors, spec and options.
  std::vector<TensorState> tensor_state() const;
  int buckets() const { return static_cast<int>(buckets_.size()); }
  // The schedule in use, e.g. "two_shot", or "two_shot+ring" when allreduces differ; "none" in a world of 1.
  std::string schedule() const;
  // Why: what schedule=auto predicted for the largest bucket, and from which link costs.
  std::string schedule_reason() const;
  ReducerMemory memory() const;
  int64_t extra_bytes() const { return memory().total(); }
  // One line per bucket: tensors, bytes, how each is compressed, schedule and why.
  std::string describe() const;

 private:
  struct Bucket : BucketRange {
    std::unique_ptr<Codec> codec;
    float* data = nullptr;  // what the codec works on: a part of the flat buffer, or memory adopted as it is
    bool staged = false;    // tensors are copied in and out of the flat buffer
    size_t lane = 0;

    // Of the step under way.
    int ready = 0;
    std::vector<Stream> producers;
    bool is_full() const { return ready == tensors(); }
  };
  // Where buckets are worked on one after the other.
  struct Lane {
    Stream stream = {};
    size_t workspace_bytes = 0;
    Buffer workspace = {};
    Event joined = {};  // the end of the step, for the first lane
  };
  Lane& lane_of(const Bucket& b) { return lanes_[b.lane]; }
  const Lane& lane_of(const Bucket& b) const { return lanes_[b.lane]; }

  // reducer.cpp: making one.
  void build_lanes();
  void build_buckets();
  // step.cpp: a bucket's way through a step.
  void launch(int bucket);
  void count_bytes(StepMarks& marks, int which);
  // staging.cpp: gradients that are somebody else's.
  float* common_base(const Bucket& bucket) const;
  void allocate_gradients();
  void stage(const Bucket& bucket, bool in);
  // report.cpp: what is told of it.
  const StepMarks& marks_of(int64_t step) const;
  std::string links_text() const;

  Communicator& comm_;
  const CompressionSpec spec_;
  const std::vector<GradientTensor> tensors_;
  const ReducerOptions options_;
  const GradientLayout layout_;
  Buffer gradients_, device_step_;
  std::vector<float*> adopted_;  // by tensor; empty: the gradients are in gradients_
  std::vector<Bucket> buckets_;  // empty in a world of 1
  std::vector<int> bucket_of_;   // tensor -> bucket
  std::optional<SchedulePlanner> planner_;
  uint64_t dense_bytes_ = 0;
  std::array<StepMarks, kStatsKept> marks_;
  Event full_, begun_, done_;

  std::mutex mutex_;  // ready() may come from several threads
  std::vector<bool> ready_;
  int launched_ = 0;  // buckets of the step under way whose work is enqueued
  int64_t step_ = 0, first_step_ = 0;
  // Last: destroyed first, before anything their tasks use.
  std::vector<Lane> lanes_;  // buckets take turns; the first is on stream_
  Stream stream_;
};

}  // namespace gradwire
