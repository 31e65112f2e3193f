// What a codec keeps of one tensor from one step to the next: what a checkpoint must hold. Whoever writes one
// (the C ABI's states, the trainer's checkpoints) needs to know no more than this.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/dtype.h"
#include "runtime/shape.h"

namespace gradwire {

// Of error feedback: FP32, shaped as the tensor. What matters is its sum over the ranks, so it is summed when
// ranks are fewer, and zero where there is none.
inline constexpr const char* kResidualKind = "residual";

struct TensorState {
  int tensor = 0;    // as registered with the reducer
  std::string kind;  // one of each kind per tensor; letters, digits and '_': "residual", "factor"
  DType dtype = DType::f32;
  void* data = nullptr;        // on the device
  std::vector<int64_t> shape;  // for readers of a checkpoint
  // The same bits on every rank, so that a checkpoint holds it once. Otherwise it is this rank's alone, and
  // starts afresh, a residual aside, when the number of ranks changes.
  bool same_on_all_ranks = false;

  int64_t count() const { return element_count(shape); }
  int64_t bytes() const { return count() * bytes_of(dtype); }
};

}  // namespace gradwire
