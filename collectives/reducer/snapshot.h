// A reducer's state between two steps, copied to host memory: residuals and the codecs' other state. A
// reducer of this or another group of ranks can load the snapshot to repeat a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "collectives/reducer/reducer.h"

namespace gradwire {

class ReducerSnapshot {
 public:
  // Enqueues the copy on a stream that has waited for the reducer's step. Only the first call allocates
  // memory. On the host the previous state remains valid until the stream reaches the copy. Later calls must
  // have the same tensors and spec.
  void take(const Stream& stream, const Reducer& reducer, int world);
  // Returns the L2 norm of all residuals once the copy is done; 0 without residuals.
  double residual_norm() const;

  // A codec of another spec starts afresh, and the snapshot's residuals are all left over.
  enum class Into : uint8_t { same_codec, other_codec };
  // Loads the state into a new reducer of the same tensors, and blocks until `stream` is done. `world`: 0 if
  // a rank was replaced. If the world size differs, state that belongs to one rank is reset (is_loaded()),
  // except residuals, which are restored bit for bit. A residual that this reducer cannot hold (a world of 1)
  // is stored in the reducer's gradients; the other gradients are then 0. Returns whether there was such a
  // residual.
  bool restore(const Stream& stream, const Reducer& reducer, int world, Into into = Into::same_codec) const;

  int64_t bytes() const { return static_cast<int64_t>(values_.size()); }

 private:
  struct Entry {
    int tensor = 0;
    std::string kind;
    bool same_on_all_ranks = false;
    size_t begin = 0, bytes = 0;  // place in values_
  };

  int world_ = 0;
  std::vector<Entry> entries_;
  std::vector<std::byte> values_;
};

}  // namespace gradwire
