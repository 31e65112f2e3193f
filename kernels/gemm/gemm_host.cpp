// Host products on OpenBLAS (kernels/blas/blas.h), which runs single-threaded within the pieces of the thread
// pool.
//
// BF16 operands stay BF16 where the processor multiplies them (bf16_gemm.h). Elsewhere they are widened to
// FP32, which is exact: B once per product, A and C piece by piece. Widening moves 6 B per element, which is
// little compared with the 2 n or 2 m operations on each element.

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/blas/blas.h"
#include "kernels/gemm/bf16_gemm.h"
#include "kernels/gemm/gemm.h"
#include "kernels/simd/vector.h"
#include "runtime/threads/thread.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/error.h"

namespace gradwire::host {
namespace {

void run(const Gemm& g) {
  if (gradwire_blas_sgemm(g.transpose_a, g.transpose_b, g.m, g.n, g.k, g.alpha, g.a.at<float>(0), g.lda,
                          g.b.at<float>(0), g.ldb, g.beta, g.c.at<float>(0), g.ldc)) {
    return;
  }
  throw OutOfResources(
      "OpenBLAS needs 128 MiB of address space for each of up to {} threads that multiply matrices: {}",
      host_threads(), no_memory_text());
}

// A thread's memory for FP32 copies; each buffer only grows.
enum class Copy { a, b, c };
float* scratch(Copy which, int64_t floats) {
  static PerThread<std::array<std::vector<float>, 3>> memory;
  auto& mine = memory.get()[static_cast<size_t>(which)];
  if (static_cast<int64_t>(mine.size()) < floats) mine.resize(static_cast<size_t>(floats));
  return mine.data();
}

// Widens rows x columns BF16 elements, rows `ld` apart, to dense FP32.
void widen_matrix(const Bf16* from, int64_t ld, int64_t rows, int64_t columns, float* to) {
  for (int64_t row = 0; row < rows; ++row) widen_all(from + row * ld, columns, to + row * columns);
}

// Computes rows [begin, end) of a product of BF16 matrices; `b` is op(B)'s matrix as dense FP32.
void rows_of_bf16(const Gemm& g, const Bf16* a, const float* b, int64_t index, int64_t begin, int64_t end) {
  const int64_t rows = end - begin, first = index * g.stride_c + begin * g.ldc;
  const bool fp32 = g.c.type == Element::fp32;
  float* wide_a = scratch(Copy::a, rows * g.k);
  if (g.transpose_a) {
    widen_matrix(a + begin, g.lda, g.k, rows, wide_a);
  } else {
    widen_matrix(a + begin * g.lda, g.lda, rows, g.k, wide_a);
  }
  Gemm p{.transpose_a = g.transpose_a,
         .transpose_b = g.transpose_b,
         .m = rows,
         .n = g.n,
         .k = g.k,
         .a = wide_a,
         .lda = g.transpose_a ? rows : g.k,
         .b = b,
         .ldb = g.transpose_b ? g.k : g.n,
         .ldc = fp32 ? g.ldc : g.n,
         .alpha = g.alpha,
         .beta = g.beta};
  float* const c = fp32 ? g.c.at<float>(first) : scratch(Copy::c, rows * g.n);
  p.c = c;
  if (!fp32 && g.beta != 0.0f) widen_matrix(g.c.at<Bf16>(first), g.ldc, rows, g.n, c);
  is_small(g) ? small_gemm(p, 0, 1) : run(p);
  for (int64_t row = 0; row < rows; ++row) {
    if (!fp32) {
      narrow_all(c + row * g.n, g.bias.at<Bf16>(0), g.n, g.c.at<Bf16>(first + row * g.ldc));
    } else if (g.bias.data != nullptr) {
      add_all(g.bias.at<float>(0), g.n, c + row * g.ldc);
    }
  }
}

// Returns the thread's packed panels, which only grow, like scratch().
Bf16Panels& thread_panels() {
  static PerThread<Bf16Panels> panels;
  return panels.get();
}

// Returns the number of pieces of whole tiles for a product's rows. Each piece reads all of B, so it needs
// many rows, but the rows must stay in the second-level cache (2 MiB on processors with AMX, 1 MiB on other
// processors). The number of pieces is a multiple of the number of threads, since there are few pieces.
int64_t pieces_of_rows(int64_t m, int64_t k, const Bf16TileShape& tile) {
  const int64_t max_rows = tile.in_blocks ? 512 : 256, cache_bytes = tile.in_blocks ? 3 << 19 : 1 << 20;
  const int64_t rows = std::clamp<int64_t>(cache_bytes / (2 * std::max<int64_t>(1, k)), tile.rows, max_rows);
  const int64_t threads = host_threads(), pieces = (m + rows - 1) / rows;
  return std::min((m + tile.rows - 1) / tile.rows, (pieces + threads - 1) / threads * threads);
}

void one_product_in_bf16(const Gemm& g, Bf16Products way) {
  Bf16Panels& b = thread_panels();
  b.resize(g, way);
  // Adjacent panels share rows, but each thread should get some panels.
  const int64_t panels_at_once =
      std::max(std::clamp<int64_t>(b.count() / (4 * host_threads()), 1, 8), 1024 / std::max<int64_t>(1, g.k));
  parallel_for(b.count(), panels_at_once, [&](int64_t begin, int64_t end) { b.pack(g, 0, begin, end); });
  const Bf16TileShape tile = tile_shape(way);
  const int64_t tiles = (g.m + tile.rows - 1) / tile.rows, pieces = pieces_of_rows(g.m, g.k, tile);
  parallel_for(pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      bf16_gemm_rows(g, way, b, 0, tiles * i / pieces * tile.rows,
                     std::min(g.m, tiles * (i + 1) / pieces * tile.rows));
    }
  });
}

void one_bf16_product(const Gemm& g, int64_t piece) {
  const Bf16Products way = bf16_products();
  if (way != Bf16Products::widened) return one_product_in_bf16(g, way);
  const int64_t stored = g.transpose_b ? g.n : g.k, columns = g.transpose_b ? g.k : g.n;
  float* wide_b = scratch(Copy::b, stored * columns);
  parallel_for(
      stored, std::max<int64_t>(1, 32768 / std::max<int64_t>(1, columns)), [&](int64_t begin, int64_t end) {
        widen_matrix(g.b.at<Bf16>(begin * g.ldb), g.ldb, end - begin, columns, wide_b + begin * columns);
      });
  parallel_for(g.m, piece,
               [&](int64_t begin, int64_t end) { rows_of_bf16(g, g.a.at<Bf16>(0), wide_b, 0, begin, end); });
}

// Computes rows [begin, end), columns [first, last) of one FP32 product.
void part_of_product(const Gemm& g, int64_t index, int64_t begin, int64_t end, int64_t first, int64_t last) {
  const float* a = g.a.at<float>(index * g.stride_a + (g.transpose_a ? begin : begin * g.lda));
  const float* b = g.b.at<float>(index * g.stride_b + (g.transpose_b ? first * g.ldb : first));
  float* c = g.c.at<float>(index * g.stride_c + begin * g.ldc + first);
  Gemm part = g;
  part.m = end - begin, part.n = last - first, part.a = a, part.b = b, part.c = c;
  run(part);
  if (g.bias.data == nullptr) return;
  for (int64_t row = begin; row < end; ++row, c += g.ldc) add_all(g.bias.at<float>(first), last - first, c);
}

// Computes one FP32 product in pieces. OpenBLAS packs parts of A and B again for each piece, so few large
// pieces are faster: pieces of 400 rows run at 1.5 times the speed of pieces of 64. However, there must be
// enough pieces for all threads.
void one_fp32_product(const Gemm& g) {
  constexpr int64_t kRows = 256, kMinColumns = 512, kEnough = 16;
  const int64_t row_pieces = (g.m + kRows - 1) / kRows;
  int64_t columns = g.n;
  while (row_pieces * ((g.n + columns - 1) / columns) < kEnough && columns >= 2 * kMinColumns) {
    columns = (columns / 2 + 31) / 32 * 32;
  }
  const int64_t column_pieces = (g.n + columns - 1) / columns;
  parallel_for(row_pieces * column_pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / column_pieces * kRows, column = i % column_pieces * columns;
      part_of_product(g, 0, row, std::min(g.m, row + kRows), column, std::min(g.n, column + columns));
    }
  });
}

// Computes products [begin, end) of a batch of BF16 matrices.
void bf16_batch(const Gemm& g, int64_t begin, int64_t end) {
  const Bf16Products way = bf16_products();
  // Whether the products fill enough of the AMX tiles to be faster than small_gemm: AMX is twice as fast for
  // 50 x 50 x 64, small_gemm for 17 x 17 x 16.
  const bool amx = way == Bf16Products::amx || way == Bf16Products::amx_emulated;
  if (amx ? g.m * g.n * g.k >= 16384 : way != Bf16Products::widened && !is_small(g)) {
    Bf16Panels& b = thread_panels();
    b.resize(g, way);
    for (int64_t i = begin; i < end; ++i) {
      b.pack(g, i, 0, b.count());
      bf16_gemm_rows(g, way, b, i, 0, g.m);
    }
    return;
  }
  const int64_t stored = g.transpose_b ? g.n : g.k, columns = g.transpose_b ? g.k : g.n;
  float* wide_b = scratch(Copy::b, stored * columns);
  for (int64_t i = begin; i < end; ++i) {
    widen_matrix(g.b.at<Bf16>(i * g.stride_b), g.ldb, stored, columns, wide_b);
    rows_of_bf16(g, g.a.at<Bf16>(i * g.stride_a), wide_b, i, 0, g.m);
  }
}

}  // namespace

void gemm(const Gemm& g) {
  detail::check(g);
  if (g.m == 0 || g.n == 0 || g.batch == 0) return;
  if (gradwire_blas()->error != nullptr) throw BadInput(gradwire_blas()->error);
  if (g.epilogue != Epilogue::none) {
    gemm(without_epilogue(g));
    return apply_epilogue(
        g, [](const auto& a) { bias_gelu(a); }, [](const auto& a) { bias_gelu_backward(a); });
  }
  const bool bf16 = g.a.type == Element::bf16;
  // A piece is worth about 4 MFLOP: a fraction of a millisecond.
  constexpr double kPieceFlops = 4e6;
  const double row_flops = 2.0 * static_cast<double>(g.n) * static_cast<double>(std::max<int64_t>(1, g.k));
  if (g.batch == 1) {
    int64_t rows = static_cast<int64_t>(kPieceFlops / row_flops);
    rows = std::max<int64_t>(64, (rows + 15) / 16 * 16);
    bf16 ? one_bf16_product(g, rows) : one_fp32_product(g);
  } else {
    int64_t products =
        std::max<int64_t>(1, static_cast<int64_t>(kPieceFlops / (row_flops * static_cast<double>(g.m))));
    const bool small = is_small(g);
    parallel_for(g.batch, products, [&](int64_t begin, int64_t end) {
      if (bf16) return bf16_batch(g, begin, end);
      if (small) return small_gemm(g, begin, end);
      for (int64_t i = begin; i < end; ++i) part_of_product(g, i, 0, g.m, 0, g.n);
    });
  }
}

}  // namespace gradwire::host
