#include "collectives/codec/codec.h"

#include <fnmatch.h>

#include <algorithm>
#include <numeric>

#include "runtime/util/error.h"

namespace gradwire {
namespace {

// dense=auto: matrices of fewer elements are dense.
constexpr int64_t kSmallMatrix = 1024;
// dense=auto: vectors (one row or column) of at most this many elements are dense. A longer vector is
// probably a flattened model, not a bias.
constexpr int64_t kLongestVector = 1 << 16;

bool matches(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

}  // namespace

BucketAllreduce BucketContext::allreduce(const std::string& part, Wire wire, const ProgramBuffers& buffers,
                                         int64_t first, bool sliced) const {
  SchedulePlanner::Choice choice =
      !buffers.shards.empty() ? scatter_planner->choose(buffers.count, wire, buffers.shards)
      : planner != nullptr    ? planner->choose(buffers.count, wire)
                              : SchedulePlanner::Choice{schedule, "requested", 0, slice_bytes};
  auto program = std::make_unique<Program>(
      *transport, choice.schedule, buffers,
      Program::Options{.what = part.empty() ? name : fmt::format("{} ({})", name, part),
                       .part = part,
                       .wire = wire,
                       .fp32_intra_node = spec.fp32_intra_node,
                       .scale = scale,
                       .rounding = {wire->stochastic ? spec.rounding : Rounding::nearest, rounding_seed, step,
                                    first_element + first},
                       .spec = spec.to_string(),
                       .transfers = transfers,
                       .beside_others = beside_others,
                       .slice_bytes = sliced ? choice.slice_bytes : 0});
  return {std::move(choice), std::move(program)};
}

Buffer BucketContext::zeros(int64_t floats) const {
  Buffer buffer = make_buffer<float>(transport->device(), floats);
  fill_zero(stream, buffer.data(), buffer.bytes());
  return buffer;
}

std::unique_ptr<Codec> make_codec(const BucketContext& context) {
  switch (context.spec.method) {
    case CompressionSpec::Method::wire:
      return nullptr;
    case CompressionSpec::Method::powersgd:
    case CompressionSpec::Method::dion:
      return make_powersgd_codec(context);
    case CompressionSpec::Method::randk:
      return make_randk_codec(context);
  }
  throw Error("make_codec: unknown method");
}

bool is_small(int64_t rows, int64_t cols) {
  if (rows <= 1 || cols <= 1) return rows * cols <= kLongestVector;
  return std::max(rows, cols) < kSmallMatrix && rows * cols < kSmallMatrix;
}

bool is_dense(const CompressionSpec& spec, const BucketTensor& tensor) {
  const bool small = is_small(tensor.rows, tensor.cols);
  return std::any_of(spec.dense.begin(), spec.dense.end(), [&](const std::string& name) {
    return name == kDenseAuto ? small : matches(name, tensor.name);
  });
}

void check_dense_names(const CompressionSpec& spec, const std::vector<std::string>& tensors) {
  for (const std::string& name : spec.dense) {
    const bool found = name == kDenseAuto || std::any_of(tensors.begin(), tensors.end(),
                                                         [&](auto& tensor) { return matches(name, tensor); });
    if (found) continue;
    throw BadInput(
        "compression spec '{}': no tensor of the model matches dense={}; their names are "
        "such as {}",
        spec.to_string(), name, tensors.empty() ? "" : tensors.front());
  }
}

int64_t packing_unit(Wire wire, int64_t least) {
  return wire->masks ? std::lcm(wire->granularity, least) : least;
}

std::vector<Segment> pack_tensors(const std::vector<BucketTensor>& tensors, int64_t unit) {
  std::vector<Segment> all;
  for (const BucketTensor& t : tensors) {
    if (t.count() > 0) all.push_back({t.offset, packed_elements(all, unit), t.count()});
  }
  return all;
}

int64_t packed_elements(const std::vector<Segment>& segments, int64_t unit) {
  return segments.empty() ? 0 : (segments.back().packed + segments.back().count + unit - 1) / unit * unit;
}

}  // namespace gradwire
