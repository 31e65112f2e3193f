// Products of a few dozen rows and columns, such as attention's (17 x 17 x 16), where a BLAS call costs more
// than the arithmetic.
#pragma once

#include "kernels/gemm/gemm.h"

namespace gradwire::host {

// Returns whether small_gemm is faster for each of the batch's products.
bool is_small(const Gemm& g);
// Computes products [begin, end) of the batch. Sums are in the order of k, with FMAs where the processor has
// them.
void small_gemm(const Gemm& g, int64_t begin, int64_t end);

}  // namespace gradwire::host
