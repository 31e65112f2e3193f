// PowerSGD's passes with the products by a BLAS library, one call per matrix, instead of by kernels that form M while they
// multiply. The library reads M once more: 16 B per element instead of 12 with error feedback, where M takes the
// residual's place in memory in either case; 4 without. It pays where arithmetic is the limit: at high ranks.
//
//   project        form (M into the residual, 12 B)   P = M Q     overwrite: NaN where M was not finite
//   project_onto   form                               Q = M^T P   overwrite
//   back_project                                      Q = M^T P   overwrite: 0 where flagged
//
// Residuals have the bits of the fused passes, factors may differ in their last ones. What the residual keeps is finite
// even where M is not, so that the product alone would not tell: form marks such matrices.
//
// On CUDA the library is cuBLAS, which is loaded when it is first asked for: libgradwire.so does not need it. On the host
// there is none, because the passes are bound by memory there; tests put a stand-in in its place.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "kernels/powersgd/powersgd.h"

namespace gradwire {

// P (rows, rank) = M Q or, onto P, Q (cols, rank) = M^T P, all row-major FP32 without gaps.
struct ThinProduct {
  bool onto_p = false;
  int32_t rows = 0, cols = 0, rank = 0;
  const float* m = nullptr;
  const float* factor = nullptr;  // Q; onto_p: P
  float* out = nullptr;           // P; onto_p: Q
};

// The same in the terms of BLAS's sgemm, which is column-major: C (m, n) = A op(B), with op(B) (k, n). A row-major matrix
// is the column-major one of its transpose.
struct ThinGemm {
  bool transpose_b = false;
  int m = 0, n = 0, k = 0;
  const float* a = nullptr;
  int lda = 0;
  const float* b = nullptr;
  int ldb = 0;
  float* c = nullptr;
  int ldc = 0;
};
ThinGemm thin_gemm(const ThinProduct& product);

class ThinProducts {
 public:
  virtual ~ThinProducts() = default;
  // Its name and version: another one may be faster or slower.
  virtual std::string name() const = 0;
  // What the device is sold as, "NVIDIA H100 80GB HBM3".
  virtual std::string device_name(const Device& device) const = 0;
  virtual void run(const Stream& stream, std::span<const ThinProduct> products) = 0;
};

// The device's library; null: there is none, for the reason that thin_products_obstacle() gives.
ThinProducts* thin_products(const Device& device);
std::string thin_products_obstacle(const Device& device);
// For tests: a stand-in on the host; null: none again.
void stand_in_for_thin_products(ThinProducts* on_the_host);

namespace by_library {
// `marks`: scratch, an int32_t for each matrix of the table; without a residual it is not used.
void powersgd_project(const Stream& stream, const PowerSgdProject& args, ThinProducts& library,
                      int32_t* marks);
void powersgd_project_onto(const Stream& stream, const PowerSgdProjectOnto& args, ThinProducts& library,
                           int32_t* marks);
void powersgd_back_project(const Stream& stream, const PowerSgdBackProject& args, ThinProducts& library);
}  // namespace by_library

namespace cuda {
ThinProducts* thin_products(std::string& obstacle);
}  // namespace cuda

}  // namespace gradwire
