// FP32 products by a private copy of OpenBLAS: libgradwire_blas.so, linked from OpenBLAS's static archive.
//
// Why a copy of our own. OpenBLAS chooses its kernels by the processor's model number when it is loaded, and
// takes SSE3 ones (a sixth of the speed or less) on a processor newer than itself; the way out is an
// environment variable that it reads at that moment. In somebody's process that moment is over, the variable
// is theirs, and so is the number of threads of the OpenBLAS that numpy or torch brought. The copy shares
// nothing with theirs: its symbols are hidden, it reads no OPENBLAS_* or OMP_* variable, it starts no
// threads, and its kernels are corrected by what CPUID says the processor can do.
//
// Its own choice stands wherever that is as good as the processor, so bits stay what they were there.
#pragma once

#include <cstdint>

extern "C" {

struct GradwireBlas {
  const char* version;     // "OpenBLAS 0.3.21"
  const char* kernels;     // the set in use, by OpenBLAS's name: "Zen", "SkylakeX"
  const char* instead_of;  // what OpenBLAS would have taken, when that was corrected; else null
  const char* wanted;      // what GRADWIRE_BLAS_KERNELS says; null: unset
  const char* error;       // why that cannot be; no product may be called then. null: all is well
};
const GradwireBlas* gradwire_blas();

// C = alpha op(A) op(B) + beta C, row-major, as cblas_sgemm. In the calling thread; any number of threads may
// call at once.
void gradwire_blas_sgemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha,
                         const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* c,
                         int64_t ldc);

}  // extern "C"
