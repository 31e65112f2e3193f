// A reducer's state between two steps, copied to host memory: residuals, and whatever else its codecs keep. With it a
// step can be repeated, by the same reducer or by one of another group of ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "collectives/reducer/reducer.h"

namespace gradwire {

class ReducerSnapshot {
 public:
  // Enqueues the copy, on a host stream that has waited for the reducer's step. Only the first call allocates: until the
  // stream gets to the copy, the earlier state is whole. Later calls must be for the same tensors and spec.
  void take(const Stream& stream, const Reducer& reducer, int world);
  // The L2 norm of all residuals, once the copy is done. 0 where none are kept.
  double residual_norm() const;

  // Gives the state to a fresh reducer of the same tensors and spec, and waits for `stream`. In a group of another size,
  // state that belongs to one rank starts afresh, as after a checkpoint, but for residuals, which come back bit for
  // bit. Where this reducer has no place for one (a world of 1) it is left in `left_over()`, which is laid out as the
  // flat gradient buffer and asked for once: the result is then true.
  bool restore(const Stream& stream, const Reducer& reducer, int world,
               const std::function<float*()>& left_over) const;

  int64_t bytes() const { return static_cast<int64_t>(values_.size()); }

 private:
  struct Entry {
    int tensor = 0;
    std::string kind;
    bool same_on_all_ranks = false;
    size_t begin = 0, bytes = 0;  // in values_
  };
  bool comes_back(const Entry& entry, int world) const;

  int world_ = 0;
  std::vector<Entry> entries_;
  std::vector<std::byte> values_;
};

}  // namespace gradwire
