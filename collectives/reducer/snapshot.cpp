#include "collectives/reducer/snapshot.h"

#include <algorithm>
#include <array>
#include <cmath>

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
  if (entries_.size() != states.size()) {
    entries_.clear();
    size_t end = 0;
    for (const TensorState& state : states) {
      const auto bytes = static_cast<size_t>(state.bytes());
      entries_.push_back({state.tensor, state.kind, state.same_on_all_ranks, end, bytes});
      end += (bytes + 15) / 16 * 16;
    }
    values_.resize(end);
  }
  if (stream.device().is_host()) {
    stream.submit([this, world] { world_ = world; });  // with the values
  } else {
    world_ = world;
  }
  for (size_t i = 0; i < states.size(); ++i) {
    states[i].read(stream, 0, {values_.data() + entries_[i].begin, entries_[i].bytes});
  }
}

double ReducerSnapshot::residual_norm() const {
  double sum = 0;
  for (const Entry& entry : entries_) {
    if (entry.kind != kResidualKind) continue;
    sum += sum_of_squares(reinterpret_cast<const float*>(values_.data() + entry.begin),
                          entry.bytes / sizeof(float));
  }
  return std::sqrt(sum);
}

bool ReducerSnapshot::restore(const Stream& stream, const Reducer& reducer, int world, Into into) const {
  const std::vector<TensorState> states =
      into == Into::same_codec ? reducer.tensor_state() : std::vector<TensorState>();
  float* rest = nullptr;
  const FinishOnError finish(stream);
  for (const Entry& entry : entries_) {
    if (!is_loaded(entry.kind, entry.same_on_all_ranks, world_, world)) continue;
    const std::byte* const from = values_.data() + entry.begin;
    const auto to = std::find_if(states.begin(), states.end(), [&](const TensorState& state) {
      return state.tensor == entry.tensor && state.kind == entry.kind;
    });
    if (to != states.end()) {
      if (static_cast<size_t>(to->bytes()) != entry.bytes) {
        throw Error("ReducerSnapshot::restore: '{}' of tensor {} has {} bytes, the snapshot {}", entry.kind,
                    entry.tensor, to->bytes(), entry.bytes);
      }
      to->write(stream, 0, {from, entry.bytes});
    } else if (into == Into::same_codec && world_ == world) {
      throw Error("ReducerSnapshot::restore: no place for '{}' of tensor {}", entry.kind, entry.tensor);
    } else if (entry.kind == kResidualKind) {
      if (rest == nullptr) {
        rest = reducer.gradients().as<float>();
        fill_zero(stream, rest, static_cast<size_t>(reducer.elements()) * sizeof(float));
      }
      copy(stream, rest + reducer.offset(entry.tensor), from, entry.bytes);
    }
  }
  stream.synchronize();
  return rest != nullptr;
}

}  // namespace gradwire
