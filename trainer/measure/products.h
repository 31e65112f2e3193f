// What computes products on the host, in words, and whether it is as fast as the processor.
#pragma once

#include <string>

namespace gradwire {

// "OpenBLAS 0.3.21, Zen kernels", and who chose them when OpenBLAS did not. Throws BadInput when
// GRADWIRE_BLAS_KERNELS names what is not there.
std::string host_products_text();

// The speed of an FP32 product as a share of what the core's FMA units can do, each the best of several runs
// in the calling thread. Counted in the thread's CPU time, so that other programs on the same cores hardly
// matter. Takes about 50 ms. NaN: the processor has no AVX2, or the build cannot use it (sanitizers).
double measure_fma_share();

// Empty when the share is what it should be, or NaN.
std::string slow_products_warning(double fma_share);

}  // namespace gradwire
