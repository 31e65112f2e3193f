// Definitions that the CUDA ops of the wire formats share.
#pragma once

#include "kernels/wire/format.h"
#include "runtime/device/launch.cuh"

namespace gradwire::cuda {

// The variants of a reduce_encode kernel: sum without encoding, or a rounding mode.
enum class Coding { none, nearest, stochastic };

inline Coding coding_of(const ReduceEncode& a) {
  if (a.wire == nullptr) return Coding::none;
  return a.rounding.mode == Rounding::nearest ? Coding::nearest : Coding::stochastic;
}

__device__ __forceinline__ uint64_t step_of(const WireRounding& rounding) {
  return rounding.step != nullptr ? *rounding.step : 0;
}

// Returns whether all pointers allow 16-byte accesses; a null pointer does.
template <typename... Pointers>
bool aligned(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace gradwire::cuda
