// The pipeline of a bucket: the stages of its steps, around the allreduce that averages it. A spec determines
// which stages there are; run() calls them in this order:
//
//   unused     skip_unused: tensors whose gradient is zero on every rank get a gradient of zero, and their
//              state (residual, momentum, estimates, factors) keeps its bits, as in frameworks. Otherwise the
//              residual would be sent in a mean that DistributedDataParallel throws away. Ranks add up one
//              float per tensor before each step. The state of an unused tensor is copied to the host before
//              the step and back after it. On CUDA the host waits for both, so steps cannot be captured in a
//              graph. With residual=int8, values that share a block with a used tensor are rounded to the
//              block's unit.
//   max_norm=C local gradient clipping, as in Deep Gradient Compression: a rank first scales each tensor's
//              gradient, also of dense tensors, to a norm of at most C / sqrt(ranks). What clipping takes
//              away is forgotten. Two launches per tensor on CUDA.
//   ef=ef21    EF21 (Richtarik, Sokolov, Fatkhullin, NeurIPS 2021). Rank i has an estimate h_i of its
//              gradient g_i; all ranks have h, the mean of the estimates. A step averages the compressed
//              differences c_i = C(g_i - h_i); then h_i += c_i, h += mean of the c_i, and the gradient
//              becomes h. A rank computes c_i = g_i - h_i - e_i from what its encodes lost, e_i, the
//              residual of a codec that begins each step without one. So h stays the mean of the h_i in
//              every schedule, although partial sums are encoded again.
//              A rank stores d_i = h_i - h in place of h_i. d_i, and u below, belong to the rank; they are
//              reset to 0 when the ranks change. The sum of the h_i then still is n h.
//   momentum=M momentum correction (Lin et al., Deep Gradient Compression, ICLR 2018): u = M u + g is
//              compressed in place of g, and u becomes 0 where the bucket's mean changed. Dense tensors keep
//              their u, as in SGD with momentum. The optimizer's own momentum must be 0.
//   start=N    the first N steps average the bucket in FP32, instead of the next two stages
//   dense      moves dense tensors to a separate buffer, leaves zeros in the bucket, and averages the buffer
//              in FP32. After the step the averages return to their places in the bucket. Dense are
//                - the tensors in a spec's `dense=`. Vectors and small tensors hold a few thousandths of a
//                  model, but much of the error of a coarse format;
//                - the shorter part of a block that two tensors share, if a NaN in one would delay the other.
//              The separate buffer adds one small exchange. The codec also sends the zeros, which take at
//              most an eighth of the dense tensors' FP32 bytes in the formats whose default is dense=auto.
//              The copies of dense tensors move 20 bytes per element. A bucket of only dense tensors is
//              reduced by one allreduce in place. BF16 gradients are also summed in FP32: BF16 on the wire
//              would round the sum at each hop, in a ring of 16 ranks to three times the error.
//   average    of a wire format (`fp32`, `bf16`, ...): one allreduce of the bucket or, for a sharded reducer,
//              one reduce-scatter in place. Other methods (PowerSGD, random-k) are codecs (codec.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/codec/codec.h"

namespace gradwire {

class BucketPipeline {
 public:
  // `codec`: averages the bucket without the spec's policies; null: as the spec says. Throws BadInput for a
  // policy that does not support shards.
  explicit BucketPipeline(const BucketContext& context, std::unique_ptr<Codec> codec = nullptr);
  BucketPipeline(const BucketPipeline&) = delete;

  // As in Codec.
  size_t workspace_bytes() const;
  void bind(void* workspace);
  void rebind(float* gradients);
  void run(const Stream& stream, int64_t step, BucketPhases& phases);
  int64_t steady_from() const;
  int64_t period() const { return codec_ ? codec_->period() : 1; }
  // Returns null with EF21, which uses the residual's memory for the deviations.
  Residual* residual() { return estimates() ? nullptr : average_residual(); }
  std::vector<TensorState> tensor_state();
  int64_t state_bytes() const;
  std::string describe() const;
  PlannedAllreduces plan() const;

 private:
  void add_average(const BucketContext& c);
  void add_policies(const BucketContext& c);
  BucketAllreduce plan_format(const BucketContext& c, Wire wire, float* residual) const;
  // Returns the residual of the stage that averages; null without error feedback.
  Residual* average_residual();
  bool estimates() const { return policy_.feedback == ResidualPolicy::Feedback::ef21; }
  float* deviation();
  void pack_dense(const Stream& stream, BucketPhases& phases);
  void count_used(const Stream& stream);
  void save_unused(const Stream& stream);
  void restore_unused(const Stream& stream);

  const ResidualPolicy policy_;
  const std::vector<BucketTensor> tensors_;
  float* gradients_;
  const int64_t elements_;
  const int64_t shard_;  // begin of this rank's shard; 0 in an allreduce

  // average
  std::unique_ptr<Codec> codec_;          // null: a wire format
  std::vector<BucketAllreduce> formats_;  // of the ramp; the last is the spec's
  std::optional<Residual> residual_;      // of the formats; empty without error feedback
  std::string format_name_;
  SegmentTable gaps_;      // parts of the bucket that the formats must leave zero
  BucketAllreduce plain_;  // of the steps before compression starts

  // dense
  SegmentTable dense_;
  Buffer packed_, loaded_;  // their values; their residuals in a loaded state, only with error feedback
  BucketAllreduce dense_allreduce_;

  // EF21, momentum, clipping
  const float unit_;      // a mean is `unit` times the result: 1, or 1 / ranks if the result is a sum
  const float max_norm_;  // of a tensor's gradient on this rank; 0: not clipped
  Buffer estimate_, momentum_;
  Buffer deviation_;  // of a codec without a residual
  std::vector<ElementRange> masked_;
  // The first part of the workspace holds the sums of a tensor that is clipped, afterwards what EF21 keeps.
  void* scratch_ = nullptr;
  size_t scratch_bytes_ = 0;

  // unused
  std::vector<float> counts_;  // [tensor]: 1 if this rank used it; after the exchange the mean over the ranks
  Buffer sums_;
  BucketAllreduce used_allreduce_;
  std::vector<size_t> unused_;  // the tensors
  std::vector<std::pair<TensorState, std::vector<std::byte>>> saved_;
};

}  // namespace gradwire
