// A tensor's state in a codec between steps, for checkpoints (the C ABI's states, the trainer's files).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "runtime/device/device.h"
#include "runtime/device/dtype.h"
#include "runtime/util/shape.h"

namespace gradwire {

class Residual;

// Kind of the residual of error feedback: FP32, shaped as the tensor. Only the sum over the ranks matters, so
// residuals are added up when the world shrinks, and a missing residual counts as zero.
inline constexpr const char* kResidualKind = "residual";

struct TensorState {
  int tensor = 0;  // index as registered with the reducer
  // Unique per tensor; letters, digits and '_': "residual", "factor".
  std::string kind = {};
  DType dtype = DType::f32;
  // Address of the state on the device; null: the state is stored in `residual` from element `first` on.
  void* data = nullptr;
  const Residual* residual = nullptr;
  int64_t first = 0;
  std::vector<int64_t> shape = {};  // for readers of a checkpoint
  // True if all ranks have the same bits, so that a checkpoint holds the state once. Otherwise the state
  // belongs to this rank and, except for residuals, is reset when the world size changes.
  bool same_on_all_ranks = false;

  int64_t count() const { return element_count(shape); }
  int64_t bytes() const { return count() * bytes_of(dtype); }

  // Enqueue a copy to host memory, and a copy from host memory. May be called only between steps. To restore
  // the bits that read() returned for every state of a reducer, clear all states and then write each state as
  // a whole.
  void read(const Stream& stream, size_t first_byte, std::span<std::byte> to) const;
  void write(const Stream& stream, size_t first_byte, std::span<const std::byte> from) const;
  void clear(const Stream& stream) const;
};

// Returns whether `world` ranks load this state, which `saved_world` ranks saved. If the world sizes differ,
// state that is neither replicated nor summable is reset.
inline bool is_loaded(const std::string& kind, bool same_on_all_ranks, int saved_world, int world) {
  return saved_world == world || same_on_all_ranks || kind == kResidualKind;
}
// Returns the ranks of the saved world whose residuals `rank` of `world` ranks adds up: rank, rank + world,
// ... So the sum over all ranks is unchanged. Empty for an additional rank.
std::vector<int> merged_ranks(int rank, int world, int saved_world);
// Adds a residual to `sum`; an empty sum counts as zero.
void add_residual(std::vector<float>& sum, const std::vector<float>& residual);

}  // namespace gradwire
