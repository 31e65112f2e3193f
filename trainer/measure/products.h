// Which BLAS computes products on the host, and whether it is as fast as the processor allows.
#pragma once

#include <string>

namespace gradwire {

// "OpenBLAS 0.3.21, Zen kernels", and how they were chosen if not by OpenBLAS. Throws BadInput when
// GRADWIRE_BLAS_KERNELS names kernels that do not exist.
std::string host_products_text();

// The speed of an FP32 product as a fraction of the core's FMA peak, each the best of several runs in the
// calling thread. Measured in the thread's CPU time, so other programs on the same cores hardly matter. Takes
// about 50 ms. NaN: the processor has no AVX2, or the build is sanitized.
double measure_fma_share();

// Empty when the fraction is high enough, or NaN.
std::string slow_products_warning(double fma_share);

}  // namespace gradwire
