// Definitions shared by the host and the CUDA orthonormalization: when a column counts as dependent, when a
// pass is final, and the random values of a re-seeded column.
#pragma once

#include "kernels/math/random.h"

namespace gradwire {

// All pivots below are of the Gram matrix with columns scaled to norm 1, so they are squared sines.

// At or below this pivot, a column depends on the previous columns: only the rounding of its FP32 entries is
// left.
inline constexpr double kDependentPivot = 1e-14;
// A pass loses about eps64 / pivot of orthogonality. At or above this pivot, the result is final: the loss is
// 1e-10, far below the rounding of the FP32 result. Below this pivot, another pass follows.
inline constexpr double kFinalPivot = 1e-6;
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

}  // namespace gradwire
