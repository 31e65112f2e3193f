// CholeskyQR with FP64 Gram matrix and FP64 solve, repeated until the input of a pass was well enough
// conditioned.
//
// One pass: G = A^T A in FP64 (products of two floats are exact in FP64); scale its columns to norm 1;
// Cholesky without the dependent columns; A <- A W with W the inverse of the factor. A dependent column is
// replaced by a random column. The random column comes last in the next pass's elimination, so that it is
// made orthogonal to the other columns and leaves them unchanged.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/powersgd/large_orthonormalize_simd.h"
#include "kernels/powersgd/orthonormalize.h"
#include "kernels/simd/vector.h"
#include "runtime/threads/thread_pool.h"

GW_ALLOW_FMA

namespace gradwire::host {
namespace {

constexpr int kMax = kMaxSmallRank;

struct Workspace {
  double gram[kMax][kMax];  // lower triangle; then the Cholesky factor of the scaled, permuted Gram matrix
  double inverse[kMax][kMax];
  double weights[kMax][kMax];  // A <- A * weights, with columns in the elimination order
  double scale[kMax];
  int32_t order[kMax];  // elimination order
  int attempts[kMax];   // re-seeds of each column so far
  bool dependent[kMax];
};

// Up to rank kFewColumns: eight rows at a time, transposed, so that a lane belongs to a row, and a sum to an
// element of the lower triangle. The order of the sums does not depend on the instruction set.
constexpr int kFewColumns = 8, kTogether = 8;

using WideRows = WideSums::Vec;
using NarrowRows = Pair<NarrowSums::Vec>;

// Returns lanes `at` of the vectors from[source].
template <int kVectors>
GW_INLINE WideF32 lanes_of(const WideF32 (&from)[kVectors], const WideI32& source, const WideI32& at) {
  WideF32 x = __builtin_shuffle(from[0], from[1], source == 1 ? at + 16 : at);
#pragma GCC unroll 4
  for (int s = 2; s < kVectors; ++s)
    x = __builtin_shuffle(x, from[s], source == s ? at + 16 : Lanes<WideF32>::kIndex);
  return x;
}
// Returns the elements of eight rows at which their vectors v begin. The last vector may overlap the one
// before.
template <int kRank, typename Number>
GW_INLINE Number first_of(const Number& v) {
  return 16 * v < kTogether * kRank - 16 ? 16 * v : Number{} + (kTogether * kRank - 16);
}

// With AVX-512, permutes vectors of rows from and to vectors of two columns.
template <typename Rows, int kRank>
inline constexpr bool kPermutes = kRank > 2 && std::is_same_v<Rows, WideRows>;

template <int kRank, typename Rows>
GW_INLINE void load_rows(const float* from, Rows (&x)[kRank]) {
  if constexpr (kPermutes<Rows, kRank>) {
    constexpr int kVectors = (kRank + 1) / 2;
    WideF32 rows[kVectors], columns[kVectors];
    for (int v = 0; v < kVectors; ++v) rows[v] = load<WideF32>(from + first_of<kRank>(v));
#pragma GCC unroll 4
    for (int p = 0; p < kVectors; ++p) {
      const WideI32 lane = Lanes<WideF32>::kIndex, column = lane / kTogether + 2 * p;
      const WideI32 at = lane % kTogether * kRank + (column < kRank ? column : kRank - 1);
      const WideI32 source = at / 16 < kVectors - 1 ? at / 16 : WideI32{} + (kVectors - 1);
      columns[p] = lanes_of(rows, source, at - first_of<kRank>(source));
    }
    for (int k = 0; k < kRank; ++k) {
      const auto pair = std::bit_cast<F32x16>(columns[k / 2]);
      x[k] = converted<Rows>(k % 2 == 0 ? pair.low : pair.high);
    }
    return;
  }
  for (int k = 0; k < kRank; ++k) {
    double column[kTogether];
    for (int row = 0; row < kTogether; ++row) column[row] = from[row * kRank + k];
    x[k] = load<Rows>(column);
  }
}
template <int kRank, typename Rows>
GW_INLINE void store_rows(const Rows (&y)[kRank], float* to) {
  if constexpr (kPermutes<Rows, kRank>) {
    constexpr int kVectors = (kRank + 1) / 2;
    WideF32 columns[kVectors];
    for (int p = 0; p < kVectors; ++p) {
      const auto& second = y[std::min(2 * p + 1, kRank - 1)];
      columns[p] = std::bit_cast<WideF32>(F32x16{converted<F32x8>(y[2 * p]), converted<F32x8>(second)});
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const WideI32 at = Lanes<WideF32>::kIndex + first_of<kRank>(v), column = at % kRank;
      store(to + first_of<kRank>(v), lanes_of(columns, column / 2, column % 2 * kTogether + at / kRank));
    }
    return;
  }
  for (int k = 0; k < kRank; ++k) {
    double column[kTogether];
    store(column, y[k]);
    for (int row = 0; row < kTogether; ++row) to[row * kRank + k] = static_cast<float>(column[row]);
  }
}

// Calls body(x) for the columns of eight rows at a time, 0 after the last row, and stores x unless `out` is
// null.
template <int kRank, typename Rows, typename Body>
GW_INLINE void each_eight_rows(const float* in, float* out, int64_t n, const Body& body) {
  float part[kTogether * kRank] = {};
  for (int64_t row = 0; row < n; row += kTogether) {
    const int64_t at = row * kRank, rest = n - row < kTogether ? (n - row) * kRank : 0;
    std::copy_n(in + at, rest, part);
    Rows x[kRank];
    load_rows(rest > 0 ? part : in + at, x);
    body(x);
    if (out == nullptr) continue;
    store_rows(x, rest > 0 ? part : out + at);
    std::copy_n(part, rest, out + at);
  }
}

// Computes out = in * weights, or the Gram matrix of `in` if `out` is null.
template <typename Rows, int kRank = kFewColumns>
GW_INLINE void few_columns(const float* in, float* out, int64_t n, int rank, Workspace& w) {
  if constexpr (kRank > 1) {
    if (rank < kRank) return few_columns<Rows, kRank - 1>(in, out, n, rank, w);
  }
  if (out != nullptr) {
    return each_eight_rows<kRank, Rows>(
        in, out, n, [&](Rows(&x)[kRank]) __attribute__((always_inline)) {
          Rows y[kRank] = {};
#pragma GCC unroll 8
          for (int k = 0; k < kRank; ++k) {
#pragma GCC unroll 8
            for (int j = k; j < kRank; ++j) y[j] = y[j] + x[k] * w.weights[k][j];
          }
          std::copy_n(y, kRank, x);
        });
  }
  Rows sums[kRank][kRank] = {};
  each_eight_rows<kRank, Rows>(
      in, nullptr, n, [&](Rows(&x)[kRank]) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int i = 0; i < kRank; ++i) {
#pragma GCC unroll 8
          for (int j = 0; j <= i; ++j) sums[i][j] = sums[i][j] + x[i] * x[j];
        }
      });
  for (int i = 0; i < kRank; ++i) {
    for (int j = 0; j <= i; ++j) {
      double of_rows[kTogether];
      store(of_rows, sums[i][j]);
      w.gram[i][j] = w.gram[j][i] = std::accumulate(of_rows, of_rows + kTogether, 0.0);
    }
  }
}
GW_DEFINE_WIDEST(void, pass_of_few, few_columns, NarrowRows, WideRows,
                 (const float* in, float* out, int64_t n, int rank, Workspace& w), (in, out, n, rank, w))

// Computes G = A^T A, both triangles.
void gram_matrix(const float* a, int64_t n, int r, Workspace& w) {
  if (r <= kFewColumns) return pass_of_few(a, nullptr, n, r, w);
  alignas(64) double packed[kGramRows * kMax];
  int32_t columns[kMax];
  std::iota(columns, columns + r, 0);
  gram_block({a, n, r, columns, columns, r, r, true, packed, w.gram[0], kMax, true});
  for (int i = 0; i < r; ++i) {
    for (int j = i + 1; j < r; ++j) w.gram[i][j] = w.gram[j][i];
  }
}

// Computes out = in * weights; `out` may equal `in`.
void apply_weights(const float* in, float* out, int64_t n, int r, Workspace& w) {
  if (r <= kFewColumns && std::is_sorted(w.order, w.order + r)) return pass_of_few(in, out, n, r, w);
  alignas(64) double packed[packed_weights(kMax)];
  pack_weights(w.weights[0], kMax, r, packed);
  weigh_rows({in, out, n, r, w.order, packed});
}

// Factors the scaled Gram matrix in the elimination order w.order, and fills w.weights and w.dependent.
// Returns the smallest pivot of the independent columns, or 0 if a column is dependent.
double factor(int r, Workspace& w) {
  double smallest = 1.0;
  for (int k = 0; k < r; ++k) w.scale[k] = w.gram[k][k] > 0.0 ? 1.0 / std::sqrt(w.gram[k][k]) : 0.0;
  double lower[kMax][kMax];
  for (int j = 0; j < r; ++j) {
    int cj = w.order[j];
    for (int i = j; i < r; ++i) {
      int ci = w.order[i];
      double sum = w.gram[ci][cj] * w.scale[ci] * w.scale[cj];
      for (int k = 0; k < j; ++k) sum -= lower[i][k] * lower[j][k];
      lower[i][j] = sum;
    }
    double pivot = lower[j][j];
    w.dependent[cj] = !(pivot > kDependentPivot);
    if (w.dependent[cj]) {
      for (int i = j; i < r; ++i) lower[i][j] = 0.0;
      lower[j][j] = 1.0;
      smallest = 0.0;
    } else {
      smallest = std::min(smallest, pivot);
      double root = std::sqrt(pivot);
      for (int i = j; i < r; ++i) lower[i][j] /= root;
    }
  }
  for (int j = 0; j < r; ++j) {  // column j of the inverse of `lower`
    for (int i = 0; i < r; ++i) {
      double sum = i == j ? 1.0 : 0.0;
      for (int k = j; k < i; ++k) sum -= lower[i][k] * w.inverse[k][j];
      w.inverse[i][j] = i < j ? 0.0 : sum / lower[i][i];
    }
  }
  for (int i = 0; i < r; ++i) {
    for (int j = 0; j < r; ++j) w.weights[j][i] = w.inverse[i][j] * w.scale[w.order[j]];
    std::fill(w.weights[i] + r, w.weights[i] + (r + kPanel - 1) / kPanel * kPanel, 0.0);
  }
  return smallest;
}

}  // namespace

void orthonormalize(const Orthonormalize& a) {
  uint64_t step = a.step != nullptr ? *a.step : 0;
  parallel_for(a.table->count(), 1, [&](int64_t matrix, int64_t) {
    const auto& d = a.table->host()[matrix];
    int64_t offset = a.which == Factor::p ? d.p_offset : d.q_offset;
    int32_t n = a.which == Factor::p ? d.rows : d.cols;
    int r = d.rank;
    if (r > kMaxSmallRank || (a.keep_flags && a.flags[matrix] != 0)) return;

    Workspace w;
    for (int k = 0; k < r; ++k) {
      w.order[k] = k;
      w.attempts[k] = 0;
    }
    const float* in = a.in + offset;
    float* out = a.out + offset;
    for (int pass = 0; pass < kMaxOrthonormalizePasses; ++pass) {
      gram_matrix(in, n, r, w);
      if (pass == 0) {
        bool finite = true;
        for (int k = 0; k < r; ++k) finite = finite && std::isfinite(w.gram[k][k]);
        if (!finite) {
          a.flags[matrix] = 1;
          return;
        }
        if (!a.keep_flags) a.flags[matrix] = 0;
      }
      double smallest = factor(r, w);
      apply_weights(in, out, n, r, w);
      for (int j = 0; j < r; ++j) {
        if (!w.dependent[j]) continue;
        for (int32_t row = 0; row < n; ++row) {
          out[int64_t{row} * r + j] =
              reseed_value(a.seed, step, d.seed_id, static_cast<int>(a.which), j, w.attempts[j], row);
        }
      }
      if (smallest >= kFinalPivot) return;
      for (int k = 0; k < r; ++k) w.attempts[k] += w.dependent[k] ? 1 : 0;
      std::stable_sort(w.order, w.order + r,
                       [&](int x, int y) { return (w.attempts[x] > 0) < (w.attempts[y] > 0); });
      in = out;
    }
  });
  orthonormalize_large(a);
}

// A task per matrix: two passes over R, row by row.

void normalize_columns(const NormalizeColumns& a) {
  parallel_for(a.table->count(), 1, [&](int64_t matrix, int64_t) {
    if (a.flags[matrix] != 0) return;
    const MatrixDescriptor& d = a.table->host()[matrix];
    std::vector<double> squares(static_cast<size_t>(d.rank), 0.0);
    float* const q = a.q + d.q_offset;
    for (int64_t row = 0; row < d.cols; ++row) {
      for (int k = 0; k < d.rank; ++k) {
        const double x = q[row * d.rank + k];
        squares[static_cast<size_t>(k)] += x * x;
      }
    }
    std::vector<float> scales;  // of R or, with `orthonormal`, of Q
    for (const double sum : squares)
      scales.push_back(!a.orthonormal ? column_scale(sum) : sum > 0 ? 1.0f : 0.0f);
    const float shape = shape_scale(d.rows, d.cols);
    float* const basis = a.basis + d.q_offset;
    for (int64_t row = 0; row < d.cols; ++row) {
      for (int k = 0; k < d.rank; ++k) {
        const int64_t at = row * d.rank + k;
        const float x = (a.orthonormal ? basis[at] : q[at]) * scales[static_cast<size_t>(k)];
        if (!a.orthonormal) basis[at] = x;
        q[at] = shape * x;
      }
    }
  });
}

}  // namespace gradwire::host
