// The BLAS library for products on the host, and its speed relative to the processor's peak.
#pragma once

#include <string>

namespace gradwire {

// Returns "OpenBLAS 0.3.21, Zen kernels", and the reason if OpenBLAS did not choose the kernels. Throws
// BadInput when GRADWIRE_BLAS_KERNELS names unknown kernels.
std::string host_products_text();

// Returns the speed of an FP32 product as a fraction of the core's FMA peak, each speed the best of several
// runs in the calling thread. Measures the thread's CPU time, so other programs on the same cores hardly
// matter. Blocks for about 50 ms. Returns NaN if the processor has no AVX2 or the build is sanitized.
double measure_fma_share();

// Returns a warning about slow products; "" when the fraction is high enough or NaN.
std::string slow_products_warning(double fma_share);

}  // namespace gradwire
