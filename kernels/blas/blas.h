// FP32 products by a private copy of OpenBLAS: libgradwire_blas.so, linked from OpenBLAS's static archive.
//
// Reason: when OpenBLAS is loaded, it chooses its kernels by the processor's model number. On a newer
// processor it chooses SSE3 kernels (a sixth of the speed or less). OpenBLAS reads an environment variable
// that overrides the choice, but only while it is loaded, which is too late in a user's process. Moreover,
// the variable and the number of threads belong to the OpenBLAS of numpy or torch. The private copy shares
// nothing with that OpenBLAS: its symbols are hidden, it reads no OPENBLAS_* or OMP_* variable, it starts no
// threads, and its kernels are corrected by the processor's CPUID.
//
// Where OpenBLAS's choice suits the processor, the choice is kept, so that the bits of results are unchanged.
#pragma once

#include <cstdint>

extern "C" {

struct GradwireBlas {
  const char* version;     // "OpenBLAS 0.3.21"
  const char* kernels;     // the kernel set in use, by OpenBLAS's name: "Zen", "SkylakeX"
  const char* instead_of;  // OpenBLAS's choice, if it was corrected; else null
  const char* wanted;      // the value of GRADWIRE_BLAS_KERNELS; null: unset
  // Why `wanted` is impossible; null: no error. With an error, products must not be called.
  const char* error;
};
const GradwireBlas* gradwire_blas();

// Computes C = alpha op(A) op(B) + beta C, row-major, as cblas_sgemm does. Runs in the calling thread; any
// number of threads may call it concurrently. OpenBLAS maps 128 MiB of address space for each concurrent
// product, and keeps the mapping. Returns false, with C unchanged, if the system refuses the mapping.
[[nodiscard]] bool gradwire_blas_sgemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k,
                                       float alpha, const float* a, int64_t lda, const float* b, int64_t ldb,
                                       float beta, float* c, int64_t ldc);

}  // extern "C"
