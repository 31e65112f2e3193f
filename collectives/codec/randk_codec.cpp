// `randk`: a random share of each tensor's coordinates, the same on every rank (Stich et al., "Sparsified SGD
// with Memory", NeurIPS 2018).
//
// A step of a bucket takes one collective:
//   gather      computes S = G + E and takes the values of S at this step's coordinates, drawn from
//               (seed, step, tensor) identically on every rank; E keeps the other values, G becomes 0
//   allreduce   averages the taken values over the ranks; coordinates are not sent
//   scatter     writes the mean to G at this step's coordinates
//
// Conservation: the taken values and E together are S. The error of a lossy wire is added to E at the value's
// coordinate. Without error feedback the other values are dropped and nothing is scaled up, so the expected
// squared error is 1 - k/n.
#include <fmt/format.h>

#include <algorithm>

#include "collectives/codec/codec.h"
#include "kernels/randk/randk.h"

namespace gradwire {
namespace {

class RandKCodec final : public Codec {
 public:
  explicit RandKCodec(const BucketContext& c)
      : spec_(c.spec),
        gradients_(c.gradients),
        elements_(c.elements),
        step_(c.step),
        residual_(c, spec_.policy.keeps_errors()) {
    std::vector<RandKTensor> tensors;
    for (const BucketTensor& t : c.tensors) {
      tensors.push_back({.offset = t.offset, .count = t.count(), .index = t.index});
    }
    for (const double ratio : spec_.ramp_ratios()) {
      stages_.push_back({RandKTable(c.stream, tensors, ratio, packing_unit(c.spec.wire, 1))});
    }
    const int64_t most = stages_.front().table.values();
    values_ = c.zeros(most);
    lost_ = c.zeros(spec_.policy.keeps_errors() && !spec_.wire->exact ? most : 0);
    chosen_ = make_buffer<int64_t>(c.transport->device(), most);
    fill_zero(c.stream, chosen_.data(), chosen_.bytes());
    for (Stage& stage : stages_) {
      stage.allreduce = c.allreduce(
          "", spec_.wire, {values_.data(), values_.data(), lost_.as<float>(), stage.table.values()});
    }
    c.stream.synchronize();
  }

  size_t workspace_bytes() const override {
    size_t bytes = 0;
    for (const Stage& stage : stages_) bytes = std::max(bytes, stage.allreduce.program->workspace_bytes());
    return residual_.workspace_bytes() + bytes;
  }
  void bind(void* workspace) override {
    void* const rest = residual_.bind(workspace);
    for (const Stage& stage : stages_) stage.allreduce.program->bind(rest);
  }
  void rebind(float* gradients) override { gradients_ = gradients; }
  int64_t steady_from() const override {
    return spec_.policy.ramp > 0 ? spec_.policy.start + spec_.policy.ramp : 0;
  }

  void run(const Stream& stream, int64_t step, BucketPhases& phases) override {
    const Stage& stage = stages_[spec_.policy.stage(step, stages_.size())];
    residual_.begin_step(stream, phases);
    phases.enter(stream, Phase::compress);
    randk_gather(stream, {.table = &stage.table,
                          .grad = gradients_,
                          .residual = residual_.values(),
                          .count = elements_,
                          .values = values_.as<float>(),
                          .chosen = chosen_.as<int64_t>(),
                          .seed = spec_.seed,
                          .step = step_});
    // The residual already holds the errors of the previous step.
    fill_zero(stream, lost_.data(), lost_.bytes());
    stage.allreduce.program->run(stream, &phases);
    phases.enter(stream, Phase::decompress);
    randk_scatter(stream, {.chosen = chosen_.as<const int64_t>(),
                           .values = values_.as<const float>(),
                           .lost = lost_.as<const float>(),
                           .grad = gradients_,
                           .residual = residual_.values(),
                           .count = stage.table.values()});
    residual_.store(stream, phases);
  }

  Residual* residual() override { return residual_ ? &residual_ : nullptr; }

  int64_t state_bytes() const override {
    return residual_.bytes() + static_cast<int64_t>(values_.bytes() + lost_.bytes() + chosen_.bytes());
  }

  std::string describe() const override {
    return fmt::format("randk: {} of {} elements; wire {}{}", stages_.back().table.values(), elements_,
                       spec_.wire->name, residual_.describe());
  }

  std::vector<PlannedAllreduce> plan() const override {
    const SchedulePlanner::Choice& choice = stages_.back().allreduce.choice;
    return {{"", choice.schedule.kind, choice.reason}};
  }

 private:
  // A ratio of the ramp, and the allreduce of its values.
  struct Stage {
    RandKTable table;
    BucketAllreduce allreduce = {};
  };

  const CompressionSpec spec_;
  float* gradients_;
  const int64_t elements_;
  const uint64_t* step_;
  Residual residual_;
  Buffer values_;
  Buffer lost_;                // lossy formats with error feedback: the errors of this rank's encodes
  Buffer chosen_;              // each value's coordinate
  std::vector<Stage> stages_;  // the last with the spec's ratio
};

}  // namespace

std::unique_ptr<Codec> make_randk_codec(const BucketContext& context) {
  return std::make_unique<RandKCodec>(context);
}

}  // namespace gradwire
