#include "kernels/gemm/gemm.h"

#include <algorithm>
#include <limits>
#include <string>

#include "kernels/simd/vector.h"
#include "runtime/util/error.h"

namespace gradwire::detail {

void check(const Gemm& g) {
  auto fail = [](const std::string& what) { throw BadInput("gemm: " + what); };
  if (g.m < 0 || g.n < 0 || g.k < 0 || g.batch < 0) fail("m, n, k and batch must not be negative");
  auto operand = [&](const char* name, int64_t ld, int64_t row_length) {
    if (ld < row_length) {
      fail(fmt::format("{} is {}, less than its rows' {} elements", name, ld, row_length));
    }
    if (ld > std::numeric_limits<int32_t>::max()) fail(fmt::format("{} does not fit 32 bits", name));
  };
  operand("lda", g.lda, g.transpose_a ? g.m : g.k);
  operand("ldb", g.ldb, g.transpose_b ? g.k : g.n);
  operand("ldc", g.ldc, g.n);
  if (std::max({g.m, g.n, g.k, g.batch}) > std::numeric_limits<int32_t>::max())
    fail("m, n, k and batch must be below 2^31");
  if (g.a.type != g.b.type) fail("a and b must have the same type");
  if (g.c.type == Element::bf16 && g.a.type != Element::bf16) fail("c can be bf16 only if a and b are");
  if (g.bias.data != nullptr && g.bias.type != g.c.type) fail("the bias must have c's type");
  if (g.bias.data != nullptr && g.batch != 1) fail("a bias needs batch = 1");
  if (g.epilogue != Epilogue::none) {
    const bool stores_no_aux = g.epilogue == Epilogue::gelu_tanh && g.aux.data == nullptr;
    if (!stores_no_aux && g.m > 0 && g.n > 0 && (g.aux.data == nullptr || g.aux.data == g.c.data))
      fail("an epilogue needs aux, distinct from c");
    if (!stores_no_aux && g.aux.type != g.c.type) fail("aux must have c's type");
    if (g.batch != 1 || g.beta != 0.0f || g.ldc != g.n)
      fail("an epilogue needs batch = 1, beta = 0 and ldc = n");
    if (g.epilogue == Epilogue::d_gelu_tanh && g.bias.data != nullptr)
      fail("the epilogue d_gelu_tanh takes no bias; set bias to null");
  }
  if (g.precision == Precision::bf16 || (g.precision == Precision::tf32 && g.a.type == Element::bf16))
    fail("precision must be fp32 or, for FP32 operands, tf32");
}

}  // namespace gradwire::detail

// Small products: op(B) is packed into rows of whole vectors (unless stored that way), then each block of 4
// rows by 24 columns of C stays in registers over all of k.

GW_ALLOW_FMA

namespace gradwire::host {
namespace {

// Largest number of rows, columns and k; for larger sizes OpenBLAS is at least as fast.
constexpr int64_t kLargest = 64;

// Strides of op(A): element (row, k) is a[row * row_stride + k * k_stride].
struct Left {
  const float* a;
  int64_t row_stride, k_stride;
};

// Computes C(0..kRows, 0..columns) = alpha * A B + beta * C; B has kVectors vectors per row, `ldb` apart.
template <int kRows, int kVectors>
GW_INLINE void block(const Left& left, int64_t k, const float* b, int64_t ldb, float alpha, float beta,
                     float* c, int64_t ldc, int64_t columns) {
  F32x8 sum[kRows][kVectors] = {};
  for (int64_t i = 0; i < k; ++i) {
    F32x8 row[kVectors];
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) row[v] = load<F32x8>(b + i * ldb + 8 * v);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const float a = left.a[r * left.row_stride + i * left.k_stride];
#pragma GCC unroll 3
      for (int v = 0; v < kVectors; ++v) sum[r][v] += a * row[v];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) {
      float* out = c + r * ldc + 8 * v;
      F32x8 value = sum[r][v] * alpha;
      if (8 * (v + 1) <= columns) {
        if (beta != 0.0f) value += load<F32x8>(out) * beta;
        store(out, value);
      } else {
        float values[8];
        store(values, value);
        for (int64_t j = 0; j < columns - 8 * v; ++j)
          out[j] = beta != 0.0f ? values[j] + out[j] * beta : values[j];
      }
    }
  }
}

// Computes all rows of C for the columns of one panel of B.
template <int kVectors>
GW_INLINE void panel(Left left, int64_t m, int64_t k, const float* b, int64_t ldb, float alpha, float beta,
                     float* c, int64_t ldc, int64_t columns) {
  int64_t row = 0;
  for (; row + 4 <= m; row += 4, left.a += 4 * left.row_stride) {
    block<4, kVectors>(left, k, b, ldb, alpha, beta, c + row * ldc, ldc, columns);
  }
  if (row + 2 <= m) {
    block<2, kVectors>(left, k, b, ldb, alpha, beta, c + row * ldc, ldc, columns);
    row += 2, left.a += 2 * left.row_stride;
  }
  if (row < m) block<1, kVectors>(left, k, b, ldb, alpha, beta, c + row * ldc, ldc, columns);
}

// Sets packed(row, c) = op(B)(row, c), and 0 in the columns that pad the last vector, for transpose_b.
GW_INLINE void pack_columns(const Gemm& g, const float* b, int64_t padded, float* packed) {
  const int64_t blocked = g.k / 8 * 8;
  for (int64_t c = 0; c < g.n; c += 8) {
    const int64_t columns = std::min<int64_t>(8, g.n - c);
    for (int64_t row = 0; row < blocked; row += 8) {
      F32x8 v[8];
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) v[j] = j < columns ? load<F32x8>(b + (c + j) * g.ldb + row) : F32x8{};
      transpose(v);
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) store(packed + (row + j) * padded + c, v[j]);
    }
    for (int64_t row = blocked; row < g.k; ++row) {
      for (int64_t j = 0; j < 8; ++j)
        packed[row * padded + c + j] = j < columns ? b[(c + j) * g.ldb + row] : 0.0f;
    }
  }
}

}  // namespace

bool is_small(const Gemm& g) {
  return g.batch > 1 && g.m <= kLargest && g.n <= kLargest && g.k <= kLargest;
}

GW_SIMD void small_gemm(const Gemm& g, int64_t begin, int64_t end) {
  const int64_t padded = (g.n + 7) / 8 * 8;
  const bool pack = g.transpose_b || g.n % 8 != 0;
  float packed[kLargest * kLargest];
  for (int64_t i = begin; i < end; ++i) {
    const float* b = g.b.at<float>(i * g.stride_b);
    int64_t ldb = g.ldb;
    if (pack) {
      if (g.transpose_b) pack_columns(g, b, padded, packed);
      for (int64_t row = 0; !g.transpose_b && row < g.k; ++row) {
        std::copy_n(b + row * ldb, g.n, packed + row * padded);
        std::fill(packed + row * padded + g.n, packed + (row + 1) * padded, 0.0f);
      }
      b = packed;
      ldb = padded;
    }
    const Left left{g.a.at<float>(i * g.stride_a), g.transpose_a ? 1 : g.lda, g.transpose_a ? g.lda : 1};
    float* c = g.c.at<float>(i * g.stride_c);
    for (int64_t column = 0; column < g.n; column += 24) {
      const int64_t columns = std::min<int64_t>(24, g.n - column);
      if (columns > 16) {
        panel<3>(left, g.m, g.k, b + column, ldb, g.alpha, g.beta, c + column, g.ldc, columns);
      } else if (columns > 8) {
        panel<2>(left, g.m, g.k, b + column, ldb, g.alpha, g.beta, c + column, g.ldc, columns);
      } else {
        panel<1>(left, g.m, g.k, b + column, ldb, g.alpha, g.beta, c + column, g.ldc, columns);
      }
    }
  }
}

}  // namespace gradwire::host
