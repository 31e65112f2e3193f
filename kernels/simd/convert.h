// Conversions between FP32 and BF16 on the host, whole rows at a time.
#pragma once

#include <cstdint>

#include "kernels/math/small_float.h"

namespace gradwire::host {

void widen_all(const Bf16* from, int64_t count, float* to);
// Stores from [+ bias] in `to`, rounded once; `bias` may be null.
void narrow_all(const float* from, const Bf16* bias, int64_t count, Bf16* to);
// Adds x to `to`.
void add_all(const float* x, int64_t count, float* to);

}  // namespace gradwire::host
