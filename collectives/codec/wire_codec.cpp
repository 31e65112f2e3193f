// The codec of a wire format (`fp32`, `bf16`, ...): the bucket is sent in one allreduce or, for a sharded
// reducer, in one reduce-scatter in place.
//
// The gaps between the bucket's tensors, and the parts that the codec does not compress, are zero. Some
// formats decode zeros to other values: a format of one bit per value has no zero, and NaN may spread over a
// block. So the codec resets the gaps to zero in the result, which is the next step's gradient in the gaps,
// and in the residual, because no tensor's state covers the gaps.
#include <algorithm>
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

bool all_keep_zero(const std::vector<Wire>& formats) {
  return std::ranges::all_of(formats, [](Wire wire) { return wire->keeps_zero(); });
}

class WireCodec final : public Codec {
 public:
  explicit WireCodec(const BucketContext& c)
      : policy_(c.spec.policy),
        residual_(c, !c.spec.wire->exact && policy_.keeps_errors()),
        name_(c.spec.wire->name),
        gradients_(c.gradients),
        gaps_(c.stream, all_keep_zero(c.spec.ramp_formats()) ? std::vector<Segment>() : gaps_between(c)),
        shard_(c.shards.empty()
                   ? 0
                   : std::accumulate(c.shards.begin(), c.shards.begin() + c.transport->rank(), int64_t{0})) {
    for (Wire wire : c.spec.ramp_formats()) add_stage(c, wire);
    c.stream.synchronize();
  }

  size_t workspace_bytes() const override {
    size_t bytes = 0;
    for (const Stage& stage : stages_) bytes = std::max(bytes, stage.program->workspace_bytes());
    return residual_.workspace_bytes() + bytes;
  }
  void bind(void* workspace) override {
    void* rest = residual_.bind(workspace);
    for (const Stage& stage : stages_) {
      stage.program->rebind_residual(residual_.values());
      stage.program->bind(rest);
    }
  }
  void rebind(float* gradients) override {
    gradients_ = gradients;
    for (const Stage& stage : stages_) stage.program->rebind(gradients, gradients + shard_);
  }
  int64_t steady_from() const override { return policy_.ramp > 0 ? policy_.start + policy_.ramp : 0; }
  void run(const Stream& stream, int64_t step, BucketPhases& phases) override {
    residual_.begin_step(stream, phases);
    stages_[policy_.stage(step, stages_.size())].program->run(stream, &phases);
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
    const SchedulePlanner::Choice& choice = stages_.back().choice;
    return {{"", choice.schedule.kind, choice.reason}};
  }

 private:
  // A format of the ramp, and its allreduce.
  struct Stage {
    SchedulePlanner::Choice choice;
    std::unique_ptr<Program> program;
  };

  void add_stage(const BucketContext& c, Wire wire) {
    SchedulePlanner::Choice choice =
        c.shards.empty() ? c.choose(c.elements, wire) : c.scatter_planner->choose(c.elements, wire, c.shards);
    Program::Options options = c.compressed_options("", choice.slice_bytes);
    options.wire = wire;
    if (!wire->stochastic) options.rounding.mode = Rounding::nearest;
    auto program = std::make_unique<Program>(*c.transport, choice.schedule,
                                             ProgramBuffers{.in = c.gradients,
                                                            .out = c.gradients + shard_,
                                                            .residual = residual_.values(),
                                                            .count = c.elements,
                                                            .shards = c.shards},
                                             std::move(options));
    stages_.push_back({std::move(choice), std::move(program)});
  }

  const ResidualPolicy policy_;
  Residual residual_;
  std::string name_;
  float* gradients_;
  SegmentTable gaps_;
  const int64_t shard_;        // begin of this rank's shard; 0 in an allreduce
  std::vector<Stage> stages_;  // the last in the spec's format
};

}  // namespace

std::unique_ptr<Codec> make_wire_codec(const BucketContext& context) {
  return std::make_unique<WireCodec>(context);
}

}  // namespace gradwire
