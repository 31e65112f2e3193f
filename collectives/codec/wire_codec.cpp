// The codec of a wire format (`fp32`, `bf16`, ...): the bucket is sent in one allreduce or, for a sharded
// reducer, in one reduce-scatter in place.
//
// The gaps between the bucket's tensors, and the parts that the codec does not compress, are zero. Some
// formats decode zeros to other values: a format of one bit per value has no zero, and NaN may spread over a
// block. So the codec resets the gaps to zero in the result, which is the next step's gradient in the gaps,
// and in the residual, because no tensor's state covers the gaps.
#include <numeric>

#include "collectives/codec/codec.h"
#include "collectives/codec/dense.h"
#include "kernels/powersgd/pack.h"

namespace gradwire {
namespace {

// Returns the elements of the bucket that belong to no tensor or are in `aside`. The tensors must be in the
// order of their offsets.
std::vector<Segment> gaps_between(const BucketContext& c) {
  std::vector<Segment> gaps;
  int64_t end = 0;
  const auto gap_until = [&](int64_t begin) {
    if (begin > end) gaps.push_back({.scattered = end, .packed = 0, .count = begin - end});
  };
  auto aside = c.aside.begin();
  for (const BucketTensor& tensor : c.tensors) {
    gap_until(tensor.offset);
    end = tensor.offset;
    const int64_t tensor_end = tensor.offset + tensor.count();
    for (; aside != c.aside.end() && aside->begin < tensor_end; ++aside) {
      if (aside->begin > end) end = aside->begin;
      gap_until(aside->end);
      end = aside->end;
    }
    end = tensor_end;
  }
  gap_until(c.elements);
  return gaps;
}

class WireCodec final : public Codec {
 public:
  explicit WireCodec(const BucketContext& c)
      : residual_(c, !c.spec.wire->exact && c.spec.error_feedback),
        name_(c.spec.wire->name),
        gradients_(c.gradients),
        gaps_(c.stream, c.spec.wire->keeps_zero() ? std::vector<Segment>() : gaps_between(c)),
        shard_(c.shards.empty()
                   ? 0
                   : std::accumulate(c.shards.begin(), c.shards.begin() + c.transport->rank(), int64_t{0})),
        choice_(c.shards.empty() ? c.choose(c.elements, c.spec.wire)
                                 : c.scatter_planner->choose(c.elements, c.spec.wire, c.shards)),
        program_(*c.transport, choice_.schedule,
                 {.in = c.gradients,
                  .out = c.gradients + shard_,
                  .residual = residual_.values(),
                  .count = c.elements,
                  .shards = c.shards},
                 c.compressed_options("", choice_.slice_bytes)) {
    c.stream.synchronize();
  }

  size_t workspace_bytes() const override { return residual_.workspace_bytes() + program_.workspace_bytes(); }
  void bind(void* workspace) override {
    void* rest = residual_.bind(workspace);
    program_.rebind_residual(residual_.values());
    program_.bind(rest);
  }
  void rebind(float* gradients) override {
    gradients_ = gradients;
    program_.rebind(gradients, gradients + shard_);
  }
  void run(const Stream& stream, int64_t, BucketPhases& phases) override {
    residual_.load(stream, phases);
    program_.run(stream, &phases);
    if (gaps_.count() > 0) {
      phases.enter(stream, Phase::decompress);
      pack(stream, {&gaps_, gradients_, nullptr, true});
      if (residual_) pack(stream, {&gaps_, residual_.values(), nullptr, true});
    }
    residual_.store(stream, phases);
  }
  Residual* residual() override { return residual_ ? &residual_ : nullptr; }
  int64_t state_bytes() const override { return residual_.bytes(); }
  std::string describe() const override { return name_ + residual_.describe(); }

  std::vector<PlannedAllreduce> plan() const override {
    return {{"", choice_.schedule.kind, choice_.reason}};
  }

 private:
  Residual residual_;
  std::string name_;
  float* gradients_;
  SegmentTable gaps_;
  const int64_t shard_;  // begin of this rank's shard; 0 in an allreduce
  SchedulePlanner::Choice choice_;
  Program program_;
};

}  // namespace

std::unique_ptr<Codec> make_wire_codec(const BucketContext& context) {
  return std::make_unique<WireCodec>(context);
}

}  // namespace gradwire
