// A wire format by itself (`fp32`, `bf16`, ...): the bucket crosses the wire in one allreduce.
#include "collectives/codec/codec.h"
#include "collectives/codec/dense.h"

namespace gradwire {
namespace {

class WireCodec final : public Codec {
 public:
  explicit WireCodec(const BucketContext& c)
      : residual_(c, !c.spec.wire->exact && c.spec.error_feedback),
        name_(c.spec.wire->name),
        choice_(c.choose(c.elements, c.spec.wire)),
        allreduce_(*c.transport, choice_.schedule, {c.gradients, c.gradients, residual_.values(), c.elements},
                   {.what = c.name,
                    .wire = c.spec.wire,
                    .fp32_intra_node = c.spec.fp32_intra_node,
                    .scale = c.scale,
                    .rounding = {c.spec.rounding, c.rounding_seed, c.step, c.first_element},
                    .spec = c.spec.to_string(),
                    .transfers = c.transfers,
                    .beside_others = c.beside_others,
                    .slice_bytes = choice_.slice_bytes}) {
    c.stream.synchronize();
  }

  size_t workspace_bytes() const override {
    return residual_.workspace_bytes() + allreduce_.workspace_bytes();
  }
  void bind(void* workspace) override {
    void* rest = residual_.bind(workspace);
    allreduce_.rebind_residual(residual_.values());
    allreduce_.bind(rest);
  }
  void rebind(float* gradients) override { allreduce_.rebind(gradients, gradients); }
  void run(const Stream& stream, int64_t, BucketPhases& phases) override {
    residual_.load(stream, phases);
    allreduce_.run(stream, &phases);
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
  SchedulePlanner::Choice choice_;
  Program allreduce_;
};

}  // namespace

SchedulePlanner::Choice BucketContext::choose(int64_t count, Wire wire) const {
  return planner != nullptr ? planner->choose(count, wire)
                            : SchedulePlanner::Choice{schedule, "asked for", 0, slice_bytes};
}

std::unique_ptr<Codec> make_wire_codec(const BucketContext& context) {
  return std::make_unique<WireCodec>(context);
}

std::unique_ptr<Codec> make_codec(const BucketContext& context) {
  return context.spec.dense.empty() ? make_compressing_codec(context) : make_dense_codec(context);
}

std::unique_ptr<Codec> make_compressing_codec(const BucketContext& context) {
  switch (context.spec.method) {
    case CompressionSpec::Method::wire:
      return make_wire_codec(context);
    case CompressionSpec::Method::powersgd:
      return make_powersgd_codec(context);
    case CompressionSpec::Method::randk:
      return make_randk_codec(context);
  }
  throw Error("make_codec: unknown method");
}

}  // namespace gradwire
