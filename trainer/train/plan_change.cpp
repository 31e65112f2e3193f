#include "trainer/train/plan_change.h"

#include <algorithm>

#include "runtime/device/device_cuda.h"

namespace gradwire {
namespace {

// Copies each parameter's values from one layout to another.
std::vector<float> moved(const std::vector<float>& values, const std::vector<VitParameter>& parameters,
                         const ParameterLayout& from, const ParameterLayout& to) {
  std::vector<float> out(static_cast<size_t>(to.elements));
  for (size_t i = 0; i < parameters.size(); ++i) {
    std::copy_n(values.begin() + from.offsets[i], parameters[i].elements(), out.begin() + to.offsets[i]);
  }
  return out;
}

}  // namespace

void PlanChange::take(const RankState& rank) {
  const ParameterLayout packed = packed_layout(rank.parameters);
  const auto packed_values = [&](const float* values) {
    return moved(to_host(rank.stream, values, rank.layout.elements), rank.parameters, rank.layout, packed);
  };
  weights = packed_values(rank.weights.data);
  moments.clear();
  for (const FlatState& moment : rank.moments) moments.push_back(packed_values(moment.values.data));
  const FinishOnError finish(rank.stream);
  codecs.take(rank.stream, rank.reducer, rank.comm.world());
  rank.stream.synchronize();
}

bool PlanChange::restore(const RankState& rank, const CompressionSpec& to) const {
  const Stream& stream = rank.stream;
  const ParameterLayout packed = packed_layout(rank.parameters);
  const auto put = [&](float* out, const std::vector<float>& values) {
    to_device<float>(stream, out, moved(values, rank.parameters, packed, rank.layout));
    stream.synchronize();
  };
  put(rank.weights.data, weights);
  for (size_t i = 0; i < moments.size(); ++i) put(rank.moments[i].values.data, moments[i]);
  rank.reducer.resume_at(position.step);

  return codecs.restore(
      stream, rank.reducer, rank.comm.world(),
      to.loads_state_of(spec) ? ReducerSnapshot::Into::same_codec : ReducerSnapshot::Into::other_codec);
}

void PlanChange::free() {
  // An assignment of {} would keep the memory.
  weights = std::vector<float>();
  moments = std::vector<std::vector<float>>();
  codecs = ReducerSnapshot();
}

}  // namespace gradwire
