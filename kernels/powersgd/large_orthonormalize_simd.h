// The loops of the host's orthonormalization, compiled for several instruction sets: all of them above rank
// kMaxSmallRank, and the products with A above rank 8. Every sum has the order of the rows of its factors,
// for any width of vectors. So all instruction sets compute the same bits above rank kMaxSmallRank, and all
// with fused multiply-adds below, where weights are not rounded.
//
// Floor: a sum's term takes a lane of an FP64 multiply-add, n r^2 terms per matrix for the Gram matrix and
// the rows together, and 1/3 r^3 for the factor. Zen 4 at 3.6 GHz computes 29 G terms per second and core.
#pragma once

#include <cstdint>

#include "kernels/powersgd/orthonormalize.h"
#include "kernels/simd/vector.h"

#ifdef GW_SIMD_CHOOSES
#include <immintrin.h>
#endif

namespace gradwire::host {

// The sums that stay in registers: kRows x kVecs vectors.
struct NarrowSums {
  using Vec = double __attribute__((vector_size(32)));
  using Floats = float __attribute__((vector_size(16)));
  static constexpr int kLanes = 4, kRows = 4, kVecs = 2, kColumns = kVecs * kLanes;
};
struct WideSums {
  using Vec = double __attribute__((vector_size(64)));
  using Floats = float __attribute__((vector_size(32)));
  static constexpr int kLanes = 8, kRows = 8, kVecs = 2, kColumns = kVecs * kLanes;
};

// Converts between floats and doubles. GCC 12 converts vectors of 64 bytes by halves.
template <typename To, typename From>
GW_INLINE To converted(const From& x) {
#ifdef GW_SIMD_CHOOSES
  constexpr int kRoundAsSet = 4;
  if constexpr (sizeof(To) == 64) return __builtin_ia32_cvtps2pd512_mask(x, To{}, -1, kRoundAsSet);
  if constexpr (sizeof(From) == 64) return __builtin_ia32_cvtpd2ps512_mask(x, To{}, -1, kRoundAsSet);
#endif
  return __builtin_convertvector(x, To);
}

inline constexpr int kFloatsOfLine = 16;
// Columns of a packed panel, whose element (k, c) is at [k][c]. A panel is read as a right factor, and its
// columns as a left factor.
inline constexpr int kPanel = 16;

// Adds `count` products of x[k * x_step + i * x_stride] and row k of a panel to sums[i][v], for vectors from
// kFirst up to kEnd.
template <typename S, int kFirst, int kEnd>
GW_INLINE void add_products(const double* x, int64_t x_stride, int64_t x_step, const double* panel,
                            int64_t count, typename S::Vec (&sums)[S::kRows][S::kVecs]) {
  for (int64_t k = 0; k < count; ++k) {
    typename S::Vec right[S::kVecs];
#pragma GCC unroll 2
    for (int v = kFirst; v < kEnd; ++v) right[v] = load<typename S::Vec>(panel + k * kPanel + v * S::kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < S::kRows; ++i) {
      const double left = x[k * x_step + i * x_stride];
#pragma GCC unroll 2
      for (int v = kFirst; v < kEnd; ++v) sums[i][v] += left * right[v];
    }
  }
}

// Arguments for a block of A^T A: `left` and `right` are the columns of A that the block's rows and columns
// belong to. Elements beyond these columns, up to whole tiles, become 0; with
// `small`, they are undefined.
struct GramBlock {
  const float* a;  // (n, rank)
  int64_t n;
  int rank;
  const int32_t *left, *right;
  int left_count, right_count;
  bool diagonal;   // left is right; only elements on or below the diagonal are defined
  double* packed;  // kGramRows doubles per column, padded, of `left` and of `right`
  double* out;     // rows `stride` apart
  int64_t stride;
  bool small = false;  // up to rank kMaxSmallRank, and all columns in order
};
inline constexpr int64_t kGramRows = 128;  // rows of A that are packed at a time, to stay in the L2 cache
void gram_block(const GramBlock& a);

// Packs the first `rank` rows and columns of upper triangular weights for weigh_rows(): panels of the rows up
// to each panel's last column.
void pack_weights(const double* weights, int64_t stride, int rank, double* to);
inline int64_t packed_weights(int rank) {
  const int64_t panels = (rank + kPanel - 1) / kPanel;
  return panels * (panels + 1) / 2 * kPanel * kPanel;
}

// Arguments for rows of out = in W. Row and column k of W belong to column order[k] of the matrices. `out`
// may equal `in`.
struct WeightedRows {
  const float* in;  // (rows, rank)
  float* out;       // (rows, rank)
  int64_t rows;
  int rank;
  const int32_t* order;
  const double* weights;  // packed; from exact_weight() above rank kMaxSmallRank
};
void weigh_rows(const WeightedRows& a);

// Widens rows of A, with columns in the order of elimination, and sets the other rows of x to 0.
template <typename S>
GW_INLINE void widen_rows(const float* in, int64_t rows, int rank, const int32_t* order, bool in_order,
                          double* x) {
  if (in_order) {
    for (int64_t at = 0; at < rows * rank; ++at) x[at] = in[at];
  } else {
    for (int64_t i = 0; i < rows; ++i) {
      for (int k = 0; k < rank; ++k) x[i * rank + k] = in[i * rank + order[k]];
    }
  }
  std::fill(x + rows * rank, x + S::kRows * rank, 0.0);
}

// Narrows sums to rows of `out`; `order` holds the columns of the sums.
template <typename S>
GW_INLINE void narrow_sums(const typename S::Vec (&sums)[S::kRows][S::kVecs], int64_t rows, int columns,
                           int rank, const int32_t* order, bool in_order, float* out) {
  if (rows == S::kRows && in_order && (columns == S::kLanes || columns >= S::kColumns)) {
#pragma GCC unroll 8
    for (int i = 0; i < S::kRows; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < S::kVecs; ++v) {
        const auto part = converted<typename S::Floats>(sums[i][v]);
        if (v * S::kLanes < columns) store(out + i * rank + order[0] + v * S::kLanes, part);
      }
    }
    return;
  }
  columns = std::min(columns, S::kColumns);
  double all[S::kRows * S::kColumns];
  std::memcpy(all, sums, sizeof sums);
  for (int64_t i = 0; i < rows; ++i) {
    for (int c = 0; c < columns; ++c) {
      out[i * rank + order[c]] = static_cast<float>(all[i * S::kColumns + c]);
    }
  }
}

template <typename S>
GW_INLINE void weigh(const WeightedRows& a) {
  alignas(64) double x[S::kRows * kMaxPowerSgdRank];
  bool in_order = true;
  for (int k = 0; k < a.rank; ++k) in_order = in_order && a.order[k] == k;
  for (int64_t row = 0; row < a.rows; row += S::kRows) {
    const int64_t rows = std::min<int64_t>(S::kRows, a.rows - row);
    const float* const in = a.in + row * a.rank;
    widen_rows<S>(in, rows, a.rank, a.order, in_order, x);
    const double* panel = a.weights;
    for (int column = 0; column < a.rank; column += S::kColumns) {
      for (int i = 0; i < S::kRows * S::kColumns; i += kFloatsOfLine) {
        __builtin_prefetch(in + S::kRows * (a.rank + column) + i);  // the next rows
      }
      // The second vector's columns have weights in more rows.
      const int first = std::min(a.rank, column + S::kLanes), end = std::min(a.rank, column + S::kColumns);
      const double* const weights = panel + column % kPanel;
      typename S::Vec y[S::kRows][S::kVecs] = {};
      add_products<S, 0, S::kVecs>(x, a.rank, 1, weights, first, y);
      add_products<S, 1, S::kVecs>(x + first, a.rank, 1, weights + int64_t{first} * kPanel, end - first, y);
      narrow_sums<S>(y, rows, end - column, a.rank, a.order + column, in_order, a.out + row * a.rank);
      if ((column + S::kColumns) % kPanel == 0) panel += (column + S::kColumns) * int64_t{kPanel};
    }
  }
}

// Arguments for a product of tiles: C = sign * A B, or C += sign * A B with `add`. C must not overlap A.
struct TileProduct {
  double sign;
  const double* a;
  int64_t a_stride;
  const double* b;  // panels, by pack_tile() or pack_transposed()
  double* c;
  int64_t c_stride;
  bool add = false;
  bool a_upper = false, b_upper = false;  // upper triangular: products with zeros are skipped
  bool lower = false;                     // elements of C above the diagonal are undefined
};
void multiply_tiles(const TileProduct& p);
// Packs B, or B^T from B.
void pack_tile(const double* from, int64_t stride, double* to);
void pack_transposed(const double* from, int64_t stride, double* to);

// Factors a dense tile: A = L L^T, with 1 in place of the pivots of dependent columns. Replaces A by L^-1,
// with zeros above the diagonal, and sets dependent[column]. Returns the smallest pivot, or 0 if a column is
// dependent.
double factor_tile(double* a, int32_t* dependent);

}  // namespace gradwire::host
