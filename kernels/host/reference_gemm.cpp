// Scalar product with double accumulation.
#include "kernels/gemm.h"

namespace gradwire::reference {

void gemm(const Gemm& g) {
  detail::check(g);
  for (int64_t i = 0; i < g.batch; ++i) {
    const float *a = g.a + i * g.stride_a, *b = g.b + i * g.stride_b;
    float* c = g.c + i * g.stride_c;
    for (int64_t row = 0; row < g.m; ++row) {
      for (int64_t col = 0; col < g.n; ++col) {
        double sum = 0.0;
        for (int64_t k = 0; k < g.k; ++k) {
          double x = g.transpose_a ? a[k * g.lda + row] : a[row * g.lda + k];
          double y = g.transpose_b ? b[col * g.ldb + k] : b[k * g.ldb + col];
          sum += x * y;
        }
        float& out = c[row * g.ldc + col];
        double old =
            g.beta == 0.0f ? 0.0 : static_cast<double>(g.beta) * out;  // as BLAS: beta 0 forgets even a NaN
        out = static_cast<float>(static_cast<double>(g.alpha) * sum + old);
      }
    }
  }
}

}  // namespace gradwire::reference
