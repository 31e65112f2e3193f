#include "collectives/codec/codec.h"

#include "runtime/util/error.h"

namespace gradwire {

SchedulePlanner::Choice BucketContext::choose(int64_t count, Wire wire) const {
  return planner != nullptr ? planner->choose(count, wire)
                            : SchedulePlanner::Choice{schedule, "requested", 0, slice_bytes};
}

Program::Options BucketContext::plain_options(const std::string& part, int64_t slice_bytes) const {
  return {.what = part.empty() ? name : fmt::format("{} ({})", name, part),
          .part = part,
          .scale = scale,
          .spec = spec.to_string(),
          .transfers = transfers,
          .beside_others = beside_others,
          .slice_bytes = slice_bytes};
}

Program::Options BucketContext::compressed_options(const std::string& part, int64_t slice_bytes) const {
  Program::Options options = plain_options(part, slice_bytes);
  options.wire = spec.wire;
  options.fp32_intra_node = spec.fp32_intra_node;
  options.rounding = {spec.rounding, rounding_seed, step, first_element};
  return options;
}

std::unique_ptr<Codec> make_compressing_codec(const BucketContext& context) {
  switch (context.spec.method) {
    case CompressionSpec::Method::wire:
      return make_wire_codec(context);
    case CompressionSpec::Method::powersgd:
    case CompressionSpec::Method::dion:
      return make_powersgd_codec(context);
    case CompressionSpec::Method::randk:
      return make_randk_codec(context);
  }
  throw Error("make_codec: unknown method");
}

}  // namespace gradwire
