// A reducer's state between two steps, copied to host memory: residuals and the codecs' other state. A
// reducer of this or another group of ranks can load the snapshot to repeat a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "collectives/reducer/reducer.h"

namespace gradwire {

// Sums of the residuals that ranks have saved, by tensor.
using Residuals = std::map<size_t, std::vector<float>>;

// Removes and returns the residuals that none of these states takes: in a world of 1 no codec holds
// residuals. Drops zeros.
Residuals take_left_over(Residuals& residuals, const std::vector<TensorState>& states);

// Writes the residuals to a new reducer, and blocks until `stream` is done. The residuals that the reducer
// cannot hold, or all without `same_codec`, become the reducer's gradients; the other gradients are then 0.
// Returns whether there are such residuals.
bool load_residuals(const Stream& stream, const Reducer& reducer, Residuals residuals, bool same_codec);

class ReducerSnapshot {
 public:
  // Enqueues the copy on a stream that has waited for the reducer's step. Only the first call allocates
  // memory. On the host the previous state remains valid until the stream reaches the copy. Later calls must
  // have the same tensors and spec.
  void take(const Stream& stream, const Reducer& reducer, int world);
  // Returns the L2 norm of all residuals once the copy is done; 0 without residuals.
  double residual_norm() const;

  // Loads the state into a new reducer of the same tensors, and blocks until `stream` is done. `world`: 0 if
  // a rank was replaced. If the world size differs, state that belongs to one rank is reset (is_loaded()),
  // except residuals, which are restored bit for bit. Without `same_codec`, a codec of another spec starts
  // afresh, and the snapshot's residuals are all left over. Returns whether residuals are in the reducer's
  // gradients (load_residuals()).
  bool restore(const Stream& stream, const Reducer& reducer, int world, bool same_codec = true) const;

  int64_t bytes() const { return static_cast<int64_t>(values_.size()); }

 private:
  // Returns the place of states_[i] in values_.
  std::span<const std::byte> values(size_t i) const {
    return {values_.data() + begins_[i], static_cast<size_t>(states_[i].bytes())};
  }

  int world_ = 0;
  std::vector<TensorState> states_;  // without addresses
  std::vector<size_t> begins_;
  std::vector<std::byte> values_;
};

}  // namespace gradwire
