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
      tables_.emplace_back(c.stream, tensors, ratio, packing_unit(c.spec.wire, 1));
    }
    const int64_t most = tables_.front().values();
    values_ = c.zeros(most);
    lost_ = c.zeros(spec_.policy.keeps_errors() && !spec_.wire->exact ? most : 0);
    chosen_ = make_buffer<int64_t>(c.transport->device(), most);
    fill_zero(c.stream, chosen_.data(), chosen_.bytes());
    for (const RandKTable& table : tables_) {
      allreduces_.push_back(
          c.allreduce("", spec_.wire, {values_.data(), values_.data(), lost_.as<float>(), table.values()}));
    }
    c.stream.synchronize();
  }

  size_t workspace_bytes() const override {
    size_t bytes = 0;
    for (const BucketAllreduce& a : allreduces_) bytes = std::max(bytes, a.program->workspace_bytes());
    return residual_.workspace_bytes() + bytes;
  }
  void bind(void* workspace) override {
    void* const rest = residual_.bind(workspace);
    for (const BucketAllreduce& a : allreduces_) a.program->bind(rest);
  }
  void rebind(float* gradients) override { gradients_ = gradients; }
  int64_t steady_from() const override {
    return spec_.policy.ramp > 0 ? spec_.policy.start + spec_.policy.ramp : 0;
  }

  void run(const Stream& stream, int64_t step, BucketPhases& phases) override {
    const size_t stage = spec_.policy.stage(step, tables_.size());
    const RandKTable& table = tables_[stage];
    residual_.load(stream, phases, true);
    phases.enter(stream, Phase::compress);
    randk_gather(stream, {.table = &table,
                          .grad = gradients_,
                          .residual = residual_.values(),
                          .count = elements_,
                          .values = values_.as<float>(),
                          .chosen = chosen_.as<int64_t>(),
                          .seed = spec_.seed,
                          .step = step_});
    // The residual already holds the errors of the previous step.
    fill_zero(stream, lost_.data(), lost_.bytes());
    allreduces_[stage].program->run(stream, &phases);
    phases.enter(stream, Phase::decompress);
    randk_scatter(stream, {.chosen = chosen_.as<const int64_t>(),
                           .values = values_.as<const float>(),
                           .lost = lost_.as<const float>(),
                           .grad = gradients_,
                           .residual = residual_.values(),
                           .count = table.values()});
    residual_.store(stream, phases);
  }

  Residual* residual() override { return residual_ ? &residual_ : nullptr; }

  int64_t state_bytes() const override {
    return residual_.bytes() + static_cast<int64_t>(values_.bytes() + lost_.bytes() + chosen_.bytes());
  }

  std::string describe() const override {
    return fmt::format("randk: {} of {} elements; wire {}{}", tables_.back().values(), elements_,
                       spec_.wire->name, residual_.describe());
  }

  PlannedAllreduces plan() const override { return {{"", &allreduces_.back().choice}}; }

 private:
  const CompressionSpec spec_;
  float* gradients_;
  const int64_t elements_;
  const uint64_t* step_;
  Residual residual_;
  Buffer values_;
  Buffer lost_;    // lossy formats with error feedback: the errors of this rank's encodes
  Buffer chosen_;  // each value's coordinate
  // The ratios of a ramp, the last the spec's, and the allreduces of their values.
  std::vector<RandKTable> tables_;
  std::vector<BucketAllreduce> allreduces_;
};

}  // namespace

std::unique_ptr<Codec> make_randk_codec(const BucketContext& context) {
  return std::make_unique<RandKCodec>(context);
}

}  // namespace gradwire
