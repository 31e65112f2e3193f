// The state that a codec keeps of one tensor between steps, which a checkpoint must hold. Code that writes
// checkpoints (the C ABI's states, the trainer) needs to know nothing else about codecs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "runtime/device.h"
#include "runtime/dtype.h"
#include "runtime/shape.h"

namespace gradwire {

class Residual;

// The residual of error feedback: FP32, shaped as the tensor. Only its sum over the ranks matters, so when
// the number of ranks shrinks, residuals are added up, and a missing one counts as zero.
inline constexpr const char* kResidualKind = "residual";

struct TensorState {
  int tensor = 0;         // as registered with the reducer
  std::string kind = {};  // one of each kind per tensor; letters, digits and '_': "residual", "factor"
  DType dtype = DType::f32;
  void* data = nullptr;  // on the device; null: kept in `residual` from element `first` on
  const Residual* residual = nullptr;
  int64_t first = 0;
  std::vector<int64_t> shape = {};  // for readers of a checkpoint
  // The same bits on every rank, so a checkpoint holds it once. Otherwise it belongs to this rank and, except
  // for a residual, starts afresh when the number of ranks changes.
  bool same_on_all_ranks = false;

  int64_t count() const { return element_count(shape); }
  int64_t bytes() const { return count() * bytes_of(dtype); }

  // Copies from and to host memory, between steps, in the order of the stream; enqueues only. What read() gave
  // of every state of a reducer comes back bit for bit if all are cleared, then each is written as a whole.
  void read(const Stream& stream, size_t first_byte, std::span<std::byte> to) const;
  void write(const Stream& stream, size_t first_byte, std::span<const std::byte> from) const;
  void clear(const Stream& stream) const;
};

}  // namespace gradwire
