// Host products on OpenBLAS, which runs single-threaded inside the pieces that the thread pool hands out.
#include <cblas.h>

#include <algorithm>

#include "kernels/gemm.h"
#include "kernels/host/small_gemm.h"
#include "kernels/thread_pool.h"

extern "C" void openblas_set_num_threads(int threads);

namespace gradwire::host {
namespace {

void use_one_thread() {
  static const bool done = (openblas_set_num_threads(1), true);
  (void)done;
}

// Rows [begin, end) of one product.
void rows_of_product(const Gemm& g, const float* a, const float* b, float* c, int64_t begin, int64_t end) {
  a += g.transpose_a ? begin : begin * g.lda;
  auto distance = [](int64_t ld) {
    return static_cast<blasint>(std::max<int64_t>(1, ld));
  };  // BLAS refuses 0
  cblas_sgemm(CblasRowMajor, g.transpose_a ? CblasTrans : CblasNoTrans,
              g.transpose_b ? CblasTrans : CblasNoTrans, static_cast<blasint>(end - begin),
              static_cast<blasint>(g.n), static_cast<blasint>(g.k), g.alpha, a, distance(g.lda), b,
              distance(g.ldb), g.beta, c + begin * g.ldc, distance(g.ldc));
}

}  // namespace

void gemm(const Gemm& g) {
  detail::check(g);
  if (g.m == 0 || g.n == 0 || g.batch == 0) return;
  use_one_thread();
  // A piece is worth about 4 MFLOP: a fraction of a millisecond.
  constexpr double kPieceFlops = 4e6;
  const double row_flops = 2.0 * static_cast<double>(g.n) * static_cast<double>(std::max<int64_t>(1, g.k));
  if (g.batch == 1) {
    int64_t rows = static_cast<int64_t>(kPieceFlops / row_flops);
    rows = std::max<int64_t>(64, (rows + 15) / 16 * 16);
    parallel_for(g.m, rows,
                 [&](int64_t begin, int64_t end) { rows_of_product(g, g.a, g.b, g.c, begin, end); });
  } else {
    int64_t products =
        std::max<int64_t>(1, static_cast<int64_t>(kPieceFlops / (row_flops * static_cast<double>(g.m))));
    const bool small = is_small(g);
    parallel_for(g.batch, products, [&](int64_t begin, int64_t end) {
      if (small) return small_gemm(g, begin, end);
      for (int64_t i = begin; i < end; ++i) {
        rows_of_product(g, g.a + i * g.stride_a, g.b + i * g.stride_b, g.c + i * g.stride_c, 0, g.m);
      }
    });
  }
}

}  // namespace gradwire::host
