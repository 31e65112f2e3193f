// The second stage of the host's sums over rows; see kernels/math/column_chunks.h.
#pragma once

#include <cstdint>

#include "kernels/math/bf16.h"

namespace gradwire::host {

// sum(c) = [sum(c) +] partial(0, c) + ... + partial(count - 1, c), with `stride` floats from one partial row
// to the next.
void combine_partial_sums(const float* partial, int64_t count, int64_t stride, int64_t width, bool accumulate,
                          float* sum);
// partial(c) += x(r, c) for each of `rows` rows.
void add_rows(const float* x, int64_t rows, int64_t width, float* partial);
void add_rows(const Bf16* x, int64_t rows, int64_t width, float* partial);

}  // namespace gradwire::host
