// Definitions shared by the host and the CUDA orthonormalization: when a column counts as dependent, when a
// pass is final, and the random values of a re-seeded column.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/math/random.h"

namespace gradwire {

// All pivots below are of the Gram matrix with columns scaled to norm 1, so they are squared sines.

// At or below this pivot, a column depends on the previous columns: only the rounding of its FP32 entries is
// left.
inline constexpr double kDependentPivot = 1e-14;
// A pass loses about eps64 / pivot of orthogonality. At or above this pivot, the result is final: the loss is
// 1e-10, far below the rounding of the FP32 result. Below this pivot, another pass follows.
inline constexpr double kFinalPivot = 1e-6;
// The same above rank kMostSmallRank, where weights are rounded to 2^-30 (exact_weight): the loss is below
// 1e-8.
inline constexpr double kFinalPivotOfRoundedWeights = 1e-2;
// Two passes suffice up to a condition number of 1e8, plus one pass per re-seeding. Bad random directions,
// which are rare, need more passes.
inline constexpr int kMaxOrthonormalizePasses = 16;

// Returns row `row` of the random direction that replaces `column`; approximately normal. `attempt` counts
// the column's re-seedings.
GW_HD float reseed_value(uint64_t seed, uint64_t step, int32_t seed_id, int which, int column, int attempt,
                         int32_t row) {
  uint64_t stream = (static_cast<uint64_t>(static_cast<uint32_t>(seed_id)) << 32) |
                    (static_cast<uint64_t>(which & 0xff) << 24) |
                    (static_cast<uint64_t>(attempt & 0xff) << 16) | static_cast<uint64_t>(column & 0xffff);
  return rough_normal(philox(seed, stream, (step << 32) | static_cast<uint32_t>(row)));
}

// Rounds a weight to 29 bits, so that its product with a float is exact in FP64. A sum of products then has
// the same bits with and without fused multiply-adds, and therefore on every processor.
GW_HD double exact_weight(double weight) {
  constexpr uint64_t kDropped = (uint64_t{1} << 24) - 1;
#ifdef __CUDA_ARCH__
  const auto bits = static_cast<uint64_t>(__double_as_longlong(weight));
  return __longlong_as_double(static_cast<long long>((bits + kDropped / 2 + 1) & ~kDropped));
#else
  return std::bit_cast<double>((std::bit_cast<uint64_t>(weight) + kDropped / 2 + 1) & ~kDropped);
#endif
}

}  // namespace gradwire
