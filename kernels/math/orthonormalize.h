// Definitions shared by the host and the CUDA orthonormalization: when a column counts as dependent, when a
// pass is final, and the random values of a re-seeded column.
#pragma once

#include "kernels/math/random.h"

namespace gradwire {

// All pivots below are of the Gram matrix with columns scaled to norm 1, so they are squared sines.

// At or below this a column depends on the previous ones: only the rounding of its FP32 entries is left.
inline constexpr double kDependentPivot = 1e-14;
// A pass loses about eps64 / pivot of orthogonality. From this pivot up, its result is final (1e-10, far
// below the rounding of the FP32 result); below, another pass follows.
inline constexpr double kFinalPivot = 1e-6;
// Two passes suffice up to condition 1e8, one more per re-seeding; more passes are rare cases of bad random
// directions.
inline constexpr int kMaxOrthonormalizePasses = 16;

// Returns row `row` of the random direction that replaces `column`; about normal. `attempt` counts its
// re-seedings.
GW_HD float reseed_value(uint64_t seed, uint64_t step, int32_t seed_id, int which, int column, int attempt,
                         int32_t row) {
  uint64_t stream = (static_cast<uint64_t>(static_cast<uint32_t>(seed_id)) << 32) |
                    (static_cast<uint64_t>(which & 0xff) << 24) |
                    (static_cast<uint64_t>(attempt & 0xff) << 16) | static_cast<uint64_t>(column & 0xffff);
  return rough_normal(philox(seed, stream, (step << 32) | static_cast<uint32_t>(row)));
}

}  // namespace gradwire
