// Scalar product with double accumulation.
#include "kernels/gemm/gemm.h"

namespace gradwire::reference {
namespace {

template <typename In, typename Out>
void product(const Gemm& g) {
  const auto bias = g.bias.at<Out>(0);
  for (int64_t i = 0; i < g.batch; ++i) {
    const auto a = g.a.at<In>(i * g.stride_a), b = g.b.at<In>(i * g.stride_b);
    const auto c = g.c.at<Out>(i * g.stride_c);
    for (int64_t row = 0; row < g.m; ++row) {
      for (int64_t col = 0; col < g.n; ++col) {
        double sum = 0.0;
        for (int64_t k = 0; k < g.k; ++k) {
          double x = widen(g.transpose_a ? a[k * g.lda + row] : a[row * g.lda + k]);
          double y = widen(g.transpose_b ? b[col * g.ldb + k] : b[k * g.ldb + col]);
          sum += x * y;
        }
        Out& out = c[row * g.ldc + col];
        double old = g.beta == 0.0f ? 0.0
                                    // as in BLAS, beta = 0 ignores even a NaN in C
                                    : static_cast<double>(g.beta) * widen(out);
        if (bias != nullptr) old += widen(bias[col]);
        out = narrow<Out>(static_cast<float>(static_cast<double>(g.alpha) * sum + old));
      }
    }
  }
}

}  // namespace

void gemm(const Gemm& g) {
  detail::check(g);
  if (g.epilogue != Epilogue::none) {
    gemm(without_epilogue(g));
    return apply_epilogue(
        g, [](const auto& a) { bias_gelu(a); }, [](const auto& a) { bias_gelu_backward(a); });
  }
  if (g.a.type == Element::fp32) return product<float, float>(g);
  if (g.c.type == Element::fp32) return product<Bf16, float>(g);
  product<Bf16, Bf16>(g);
}

}  // namespace gradwire::reference
