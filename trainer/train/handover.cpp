#include "trainer/train/handover.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "runtime/device/unwinding.h"
#include "runtime/util/error.h"

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

void Handover::take(const RankState& rank) {
  const ParameterLayout packed = packed_layout(rank.parameters);
  const auto packed_values = [&](const float* values) {
    return moved(to_host(rank.stream, values, rank.layout.elements), rank.parameters, rank.layout, packed);
  };
  weights = packed_values(rank.weights.data);
  moments.clear();
  for (const FlatState& moment : rank.moments) moments.push_back(packed_values(moment.values.data));
  states.clear();
  const FinishOnError finish(rank.stream);
  for (const TensorState& state : rank.reducer.tensor_state()) {
    State& kept = states.emplace_back(State{state.tensor, state.kind, {}});
    kept.values.resize(static_cast<size_t>(state.bytes()));
    state.read(rank.stream, 0, kept.values);
    rank.stream.synchronize();
  }
}

bool Handover::restore(const RankState& rank, const CompressionSpec& to) const {
  const Stream& stream = rank.stream;
  const ParameterLayout packed = packed_layout(rank.parameters);
  const auto put = [&](float* out, const std::vector<float>& values) {
    to_device<float>(stream, out, moved(values, rank.parameters, packed, rank.layout));
    stream.synchronize();
  };
  put(rank.weights.data, weights);
  for (size_t i = 0; i < moments.size(); ++i) put(rank.moments[i].values.data, moments[i]);
  rank.reducer.resume_at(position.step);

  const std::vector<TensorState> states_here = rank.reducer.tensor_state();
  const bool same_codec = to.loads_state_of(spec);
  float* left = nullptr;
  const FinishOnError finish(stream);
  for (const State& state : states) {
    if (same_codec) {
      const auto here = std::ranges::find_if(states_here, [&](const TensorState& other) {
        return other.tensor == state.tensor && other.kind == state.kind;
      });
      if (here == states_here.end() || static_cast<size_t>(here->bytes()) != state.values.size())
        throw Error(
            fmt::format("Handover::restore: no place for '{}' of tensor {}", state.kind, state.tensor));
      here->write(stream, 0, state.values);
    } else if (state.kind == kResidualKind) {
      if (left == nullptr) {
        left = rank.left_over();
        fill_zero(stream, left, static_cast<size_t>(rank.layout.elements) * sizeof(float));
      }
      copy(stream, left + rank.layout.offsets[static_cast<size_t>(state.tensor)], state.values.data(),
           state.values.size());
    }
    stream.synchronize();
  }
  return left != nullptr;
}

void Handover::free() {
  // An assignment of {} would keep the memory.
  weights = std::vector<float>();
  moments = std::vector<std::vector<float>>();
  states = std::vector<State>();
}

}  // namespace gradwire
