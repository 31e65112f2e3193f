// CholeskyQR with FP64 Gram matrix and FP64 solve, repeated until the input of a pass was well enough
// conditioned.
//
// One pass: G = A^T A in FP64 (products of two floats are exact in FP64); scale its columns to norm 1;
// Cholesky without the dependent columns; A <- A W with W the inverse of the factor. A dependent column is
// replaced by a random column. The random column comes last in the next pass's elimination, so that it is
// made orthogonal to the other columns and leaves them unchanged.
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "kernels/powersgd/large_orthonormalize_simd.h"
#include "kernels/powersgd/orthonormalize.h"
#include "kernels/simd/vector.h"
#include "runtime/threads/thread_pool.h"

namespace gradwire::host {
namespace {

constexpr int kMax = kMaxSmallRank;
// The columns without re-seeds, in their order.
constexpr auto kNatural = [] {
  std::array<int32_t, kMax> columns{};
  for (int k = 0; k < kMax; ++k) columns[static_cast<size_t>(k)] = k;
  return columns;
}();

struct Workspace {
  double gram[kMax][kMax];  // lower triangle; then the Cholesky factor of the scaled, permuted Gram matrix
  double inverse[kMax][kMax];
  double weights[kMax][kMax];  // A <- A * weights
  double scale[kMax];
  int order[kMax];     // elimination order
  int attempts[kMax];  // re-seeds of each column so far
  bool dependent[kMax];
};

// Adds rows of A to the Gram matrix of one or two columns.
template <int kRank>
GW_INLINE void add_gram(const float* a, int64_t n, Workspace& w) {
  double sums[kRank][kRank] = {};
  for (int64_t row = 0; row < n; ++row) {
    double x[kRank];
    for (int k = 0; k < kRank; ++k) x[k] = a[row * kRank + k];
    for (int i = 0; i < kRank; ++i) {
      for (int j = 0; j < kRank; ++j) sums[i][j] += x[i] * x[j];
    }
  }
  for (int i = 0; i < kRank; ++i) std::copy_n(sums[i], kRank, w.gram[i]);
}

// Computes G = A^T A, both triangles. The order of the terms is the same for all ranks.
GW_SIMD void gram_matrix(const float* a, int64_t n, int r, Workspace& w) {
  if (r == 1) return add_gram<1>(a, n, w);
  if (r == 2) return add_gram<2>(a, n, w);
  alignas(64) double packed[kGramRows * kMax];
  gram_block({.a = a,
              .n = n,
              .rank = r,
              .left = kNatural.data(),
              .right = kNatural.data(),
              .left_count = r,
              .right_count = r,
              .diagonal = true,
              .packed = packed,
              .out = w.gram[0],
              .stride = kMax,
              .small = true});
  for (int i = 0; i < r; ++i) {
    for (int j = i + 1; j < r; ++j) w.gram[i][j] = w.gram[j][i];
  }
}

// Computes out = in * weights, row by row; `out` may equal `in`.
template <int kRank>
GW_INLINE void multiply(const float* in, float* out, int64_t n, int rank, const Workspace& w) {
  const int r = kRank > 0 ? kRank : rank;
  for (int64_t row = 0; row < n; ++row) {
    double y[kRank > 0 ? kRank : kMax] = {};
    for (int k = 0; k < r; ++k) {
      const double x = in[row * r + k];
      for (int j = 0; j < r; ++j) y[j] += x * w.weights[k][j];
    }
    for (int j = 0; j < r; ++j) out[row * r + j] = static_cast<float>(y[j]);
  }
}

GW_DEFINE_WIDEST(void, weigh_in_order, weigh, NarrowSums, WideSums, (const WeightedRows& a), (a))

GW_SIMD void apply_weights(const float* in, float* out, int64_t n, int r, const Workspace& w) {
  if (r == 1) return multiply<1>(in, out, n, r, w);
  if (r == 2) return multiply<2>(in, out, n, r, w);
  if (r == 3) return multiply<3>(in, out, n, r, w);
  if (r == 4) return multiply<4>(in, out, n, r, w);
  if (r == 8) return multiply<8>(in, out, n, r, w);
  if (!std::equal(w.order, w.order + r, kNatural.begin())) return multiply<0>(in, out, n, r, w);
  alignas(64) double packed[packed_weights(kMax)];
  pack_weights(w.weights[0], kMax, r, packed);
  weigh_in_order({in, out, n, r, kNatural.data(), packed});
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
    for (int j = 0; j < r; ++j) w.weights[w.order[j]][w.order[i]] = w.inverse[i][j] * w.scale[w.order[j]];
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
