// Products of the large orthonormalization with factors from FP32 memory. The terms of these sums are exact
// in FP64 (a float times a float or a weight of 29 bits), so fused multiply-adds do not change their bits.
#include <algorithm>

#include "kernels/powersgd/large_orthonormalize_simd.h"
#include "kernels/powersgd/powersgd.h"
#include "kernels/simd/simd.h"
#include "kernels/simd/vector.h"

GW_ALLOW_FMA

namespace gradwire::host {
namespace {

using Vec = double __attribute__((vector_size(32)));
constexpr int kLanesOfVec = 4;
constexpr int kTileRows = 4, kTileVecs = 2;  // sums that stay in registers
constexpr int kTileColumns = kTileVecs * kLanesOfVec;
constexpr int64_t kGramRows = 32;

// Adds `count` products of a column of x, x_step apart, and a row of y to a tile of `out`.
GW_INLINE void add_products(const double* x, int64_t x_stride, int64_t x_step, const double* y,
                            int64_t y_stride, int64_t count, double* out, int64_t stride) {
  Vec sums[kTileRows][kTileVecs];
  for (int i = 0; i < kTileRows; ++i) {
    for (int v = 0; v < kTileVecs; ++v) sums[i][v] = load<Vec>(out + i * stride + v * kLanesOfVec);
  }
  for (int64_t k = 0; k < count; ++k) {
    Vec right[kTileVecs];
    for (int v = 0; v < kTileVecs; ++v) right[v] = load<Vec>(y + k * y_stride + v * kLanesOfVec);
    for (int i = 0; i < kTileRows; ++i) {
      const double left = x[k * x_step + i * x_stride];
      for (int v = 0; v < kTileVecs; ++v) sums[i][v] += left * right[v];
    }
  }
  for (int i = 0; i < kTileRows; ++i) {
    for (int v = 0; v < kTileVecs; ++v) store(out + i * stride + v * kLanesOfVec, sums[i][v]);
  }
}

GW_INLINE void widen_columns(const float* a, int64_t rows, int rank, const int32_t* columns, int count,
                             double* to) {
  const bool adjacent = count == kSquareTile && columns[count - 1] - columns[0] == count - 1 &&
                        std::is_sorted(columns, columns + count);
  for (int64_t row = 0; row < rows; ++row, a += rank, to += kSquareTile) {
    if (adjacent) {
      for (int c = 0; c < kSquareTile; ++c) to[c] = a[columns[0] + c];
      continue;
    }
    for (int c = 0; c < count; ++c) to[c] = a[columns[c]];
    std::fill(to + count, to + kSquareTile, 0.0);
  }
}

}  // namespace

// The sums of a tile are stored by tiles of kTileRows x kTileColumns, in the order in which the loops use
// them: rows of a tile of `out` would share a few sets of the cache.
GW_SIMD void gram_tile(const GramTile& a) {
  constexpr int kTileSize = kTileRows * kTileColumns;
  alignas(64) double left[kGramRows * kSquareTile], right[kGramRows * kSquareTile];
  alignas(64) double sums[kSquareTile * kSquareTile] = {};
  const double* const other = a.diagonal ? left : right;
  for (int64_t row = 0; row < a.n; row += kGramRows) {
    const int64_t rows = std::min(kGramRows, a.n - row);
    widen_columns(a.a + row * a.rank, rows, a.rank, a.left, a.left_count, left);
    if (!a.diagonal) widen_columns(a.a + row * a.rank, rows, a.rank, a.right, a.right_count, right);
    double* sum = sums;
    for (int i = 0; i < kSquareTile; i += kTileRows) {
      for (int j = 0; j < kSquareTile; j += kTileColumns, sum += kTileSize) {
        if (a.diagonal && j >= i + kTileRows) continue;
        add_products(left + i, 1, kSquareTile, other + j, kSquareTile, rows, sum, kTileColumns);
      }
    }
  }
  const double* sum = sums;
  for (int i = 0; i < kSquareTile; i += kTileRows) {
    for (int j = 0; j < kSquareTile; j += kTileColumns, sum += kTileSize) {
      for (int at = 0; at < kTileSize; ++at) {
        a.out[(i + at / kTileColumns) * a.stride + j + at % kTileColumns] = sum[at];
      }
    }
  }
}

GW_SIMD void weigh_rows(const WeightedRows& a) {
  alignas(64) double x[kWeightedRows * kMaxPowerSgdRank], weights[kMaxPowerSgdRank * kTileColumns];
  for (int64_t row = 0; row < a.rows; ++row) {
    for (int k = 0; k < a.rank; ++k) x[row * a.rank + k] = a.in[row * a.rank + a.order[k]];
  }
  const int64_t whole = (a.rows + kTileRows - 1) / kTileRows * kTileRows;
  std::fill(x + a.rows * a.rank, x + whole * a.rank, 0.0);
  for (int column = 0; column < a.rank; column += kTileColumns) {
    const int columns = std::min(kTileColumns, a.rank - column), count = column + columns;
    for (int k = 0; k < count; ++k) {  // adjacent, so that they stay in the cache
      std::copy_n(a.weights + k * a.stride + column, kTileColumns, weights + int64_t{k} * kTileColumns);
    }
    for (int64_t row = 0; row < a.rows; row += kTileRows) {
      double y[kTileRows * kTileColumns] = {};
      add_products(x + row * a.rank, a.rank, 1, weights, kTileColumns, count, y, kTileColumns);
      for (int64_t i = 0; i < std::min<int64_t>(kTileRows, a.rows - row); ++i) {
        float* const to = a.out + (row + i) * a.rank;
        for (int c = 0; c < columns; ++c)
          to[a.order[column + c]] = static_cast<float>(y[i * kTileColumns + c]);
      }
    }
  }
}

}  // namespace gradwire::host
