// PowerSGD's passes in two steps, instead of by kernels that form M while they multiply. The products, by a
// BLAS library, one call per matrix, or by Gradwire's kernels, read M once more: with error feedback 16 B per
// element instead of 12 B. M replaces the residual in memory in either case. Two steps are faster where
// arithmetic is the limit: at high ranks.
//
//   project        form (M into the residual, 12 B)   P = M Q     overwrite: NaN where M was not finite
//   project_onto   form                               Q = M^T P   overwrite
//   back_project                                      Q = M^T P   overwrite: 0 where flagged
//
// Residuals have the bits of the fused passes; factors may differ in the last bits. The residual stays finite
// even where M is not, so the product alone would not reveal it: the form pass marks such matrices.
//
// On CUDA the library is cuBLAS, loaded on first use: libgradwire.so does not need it. The host does not have
// a library, because memory limits the passes on the host; tests install a stand-in.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/powersgd/powersgd.h"

namespace gradwire {

// A product with a thin factor, P (rows, rank) = M Q or, with onto_p, Q (cols, rank) = M^T P, as an sgemm of
// BLAS, which is column-major: C (m, n) = A op(B), with op(B) (k, n). A row-major matrix in memory equals the
// column-major matrix of its transpose, so P^T = Q^T M^T and Q^T = P^T M, where the memory of M is M^T.
struct ThinGemm {
  bool transpose_b = false;  // onto_p
  int m = 0, n = 0, k = 0;
  const float* a = nullptr;  // Q; onto_p: P
  int lda = 0;
  const float* b = nullptr;  // M
  int ldb = 0;
  float* c = nullptr;  // P; onto_p: Q
  int ldc = 0;
};
// Returns the products of all matrices of a table.
std::vector<ThinGemm> thin_gemms(const MatrixTable& table, bool onto_p, const float* m, const float* factors,
                                 float* out);

class ThinProducts {
 public:
  virtual ~ThinProducts() = default;
  virtual std::string name() const = 0;  // returns the library's name with its version
  virtual void run(const Stream& stream, std::span<const ThinGemm> products) = 0;
};

// Returns the device's library, or null.
ThinProducts* thin_products(const Device& device);
// Installs a stand-in for the host's library in tests; null removes it.
void stand_in_for_thin_products(ThinProducts* on_the_host);

namespace by_library {
// Run a pass with its products by the library; null: by Gradwire's kernels. `marks`: scratch memory, one
// int32_t per matrix of the table; unused without a residual.
void powersgd_project(const Stream& stream, const PowerSgdProject& args, ThinProducts* library,
                      int32_t* marks);
void powersgd_project_onto(const Stream& stream, const PowerSgdProjectOnto& args, ThinProducts* library,
                           int32_t* marks);
void powersgd_back_project(const Stream& stream, const PowerSgdBackProject& args, ThinProducts* library);
}  // namespace by_library

namespace cuda {
ThinProducts* thin_products();
}  // namespace cuda

}  // namespace gradwire
