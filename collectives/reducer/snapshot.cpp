#include "collectives/reducer/snapshot.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <span>
#include <utility>

#include "runtime/device/device.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

// Returns the sum of squares. Uses enough partial sums for the compiler to use vector registers.
double sum_of_squares(const float* values, size_t count) {
  constexpr size_t kLanes = 16;
  std::array<double, kLanes> sums{};
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const double x = values[i + lane];
      sums[lane] += x * x;
    }
  }
  for (; i < count; ++i) sums[0] += static_cast<double>(values[i]) * values[i];
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

}  // namespace

void ReducerSnapshot::take(const Stream& stream, const Reducer& reducer, int world) {
  const std::vector<TensorState> states = reducer.tensor_state();
  if (!std::ranges::equal(states_, states, {}, &TensorState::bytes, &TensorState::bytes)) {
    states_ = states;
    begins_.clear();
    size_t end = 0;
    for (TensorState& state : states_) {
      state.data = nullptr;
      state.residual = nullptr;
      begins_.push_back(end);
      end += (static_cast<size_t>(state.bytes()) + 15) / 16 * 16;
    }
    values_.resize(end);
  }
  if (stream.device().is_host()) {
    stream.submit([this, world] { world_ = world; });  // with the values
  } else {
    world_ = world;
  }
  for (size_t i = 0; i < states.size(); ++i) {
    states[i].read(stream, 0, {values_.data() + begins_[i], static_cast<size_t>(states[i].bytes())});
  }
}

double ReducerSnapshot::residual_norm() const {
  double sum = 0;
  for (size_t i = 0; i < states_.size(); ++i) {
    if (states_[i].kind != kResidualKind) continue;
    sum += sum_of_squares(reinterpret_cast<const float*>(values(i).data()), values(i).size() / sizeof(float));
  }
  return std::sqrt(sum);
}

bool ReducerSnapshot::restore(const Stream& stream, const Reducer& reducer, int world,
                              bool same_codec) const {
  const std::vector<TensorState> states = same_codec ? reducer.tensor_state() : std::vector<TensorState>();
  Residuals left;
  const FinishOnError finish(stream);
  for (size_t i = 0; i < states_.size(); ++i) {
    const TensorState& entry = states_[i];
    if (!is_loaded(entry.kind, entry.same_on_all_ranks, world_, world)) continue;
    const auto to = std::find_if(states.begin(), states.end(), [&](const TensorState& state) {
      return state.tensor == entry.tensor && state.kind == entry.kind;
    });
    if (to != states.end() && to->bytes() != entry.bytes()) {
      throw Error("ReducerSnapshot::restore: '{}' of tensor {} has {} bytes, the snapshot {}", entry.kind,
                  entry.tensor, to->bytes(), entry.bytes());
    }
    if (to == states.end() && same_codec && world_ == world) {
      throw Error("ReducerSnapshot::restore: no place for '{}' of tensor {}", entry.kind, entry.tensor);
    }
    if (to != states.end()) {
      to->write(stream, 0, values(i));
    } else if (entry.kind == kResidualKind) {
      add_residual(left[static_cast<size_t>(entry.tensor)], values(i).data(), entry.count());
    }
  }
  return load_residuals(stream, reducer, std::move(left), false);
}

Residuals take_left_over(Residuals& residuals, const std::vector<TensorState>& states) {
  Residuals rest = std::exchange(residuals, {});
  for (const TensorState& state : states) {
    if (state.kind == kResidualKind) residuals.insert(rest.extract(static_cast<size_t>(state.tensor)));
  }
  std::erase_if(
      rest, [](const auto& residual) { return std::ranges::all_of(residual.second, std::logical_not<>()); });
  return rest;
}

bool load_residuals(const Stream& stream, const Reducer& reducer, Residuals residuals, bool same_codec) {
  const std::vector<TensorState> states = same_codec ? reducer.tensor_state() : std::vector<TensorState>();
  const Residuals rest = take_left_over(residuals, states);
  const FinishOnError finish(stream);
  for (const TensorState& state : states) {
    const auto found = residuals.find(static_cast<size_t>(state.tensor));
    if (state.kind != kResidualKind || found == residuals.end()) continue;
    state.write(stream, 0, std::as_bytes(std::span<const float>(found->second)));
  }
  if (!rest.empty()) {
    float* const gradients = reducer.gradients().as<float>();
    fill_zero(stream, gradients, static_cast<size_t>(reducer.elements()) * sizeof(float));
    for (const auto& [tensor, values] : rest) {
      to_device(stream, gradients + reducer.offset(static_cast<int>(tensor)), std::span<const float>(values));
    }
  }
  stream.synchronize();
  return !rest.empty();
}

}  // namespace gradwire
