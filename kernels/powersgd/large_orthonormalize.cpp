// Tiles of the Cholesky factor of the large orthonormalization. Products and additions are rounded
// separately, so that all processors compute the same bits.
#include "kernels/powersgd/large_orthonormalize_simd.h"

#include <algorithm>
#include <cmath>

#include "kernels/powersgd/powersgd.h"

namespace gradwire::host {
namespace {

template <typename S>
GW_INLINE void multiply(const TileProduct& p) {
  for (int i0 = 0; i0 < kSquareTile; i0 += S::kRows) {
    const int first = p.a_upper ? i0 : 0, columns = p.lower ? i0 + S::kRows : kSquareTile;
    for (int j = 0; j < columns; j += S::kColumns) {
      const double* const panel = p.b + j / kPanel * kPanel * kSquareTile + j % kPanel;
      const int end = p.b_upper ? j + S::kColumns : kSquareTile;
      typename S::Vec sums[S::kRows][S::kVecs] = {};
      add_products<S, 0, S::kVecs>(p.a + i0 * p.a_stride + first, p.a_stride, 1, panel + first * kPanel,
                                   end - first, sums);
#pragma GCC unroll 8
      for (int i = 0; i < S::kRows; ++i) {
#pragma GCC unroll 2
        for (int v = 0; v < S::kVecs; ++v) {
          double* const to = p.c + (i0 + i) * p.c_stride + j + v * S::kLanes;
          const auto before = p.add ? load<typename S::Vec>(to) : typename S::Vec{};
          store(to, before + p.sign * sums[i][v]);
        }
      }
    }
  }
}

// Subtracts x * from[c] from row[c], for vectors from `first` up to `last`.
template <typename S>
GW_INLINE void subtract(double x, const double* from, int first, int last, double* row) {
  for (int at = first * S::kLanes; at <= last * S::kLanes; at += S::kLanes) {
    store(row + at, load<typename S::Vec>(row + at) - x * load<typename S::Vec>(from + at));
  }
}

template <typename S>
GW_INLINE double factor(double* a, int32_t* dependent) {
  constexpr int kSize = kSquareTile;
  alignas(64) double inverse[kSize * kSize] = {}, l[kSize];
  double smallest = 1.0;
  for (int i = 0; i < kSize; ++i) inverse[i * kSize + i] = 1.0;
  for (int j = 0; j < kSize; ++j) {
    const double pivot = a[j * kSize + j];
    const bool depends = !(pivot > kDependentPivot);
    const double inverse_root = depends ? 1.0 : 1.0 / std::sqrt(pivot);
    smallest = depends ? 0.0 : std::min(smallest, pivot);
    dependent[j] = depends ? 1 : 0;
    const int vec = j / S::kLanes;  // the vector that holds the diagonal
    double* const row_j = inverse + j * kSize;
    for (int c = 0; c <= j; ++c) row_j[c] *= inverse_root;
    for (int i = 0; i < kSize; ++i) l[i] = depends || i <= j ? 0.0 : a[i * kSize + j] * inverse_root;
    for (int i = j + 1; i < kSize; ++i) {
      subtract<S>(l[i], l, vec, i / S::kLanes, a + i * kSize);
      subtract<S>(l[i], row_j, 0, vec, inverse + i * kSize);
    }
  }
  std::copy(inverse, inverse + kSize * kSize, a);
  return smallest;
}

}  // namespace

GW_DEFINE_WIDEST(void, multiply_tiles, multiply, NarrowSums, WideSums, (const TileProduct& p), (p))
GW_DEFINE_WIDEST(double, factor_tile, factor, NarrowSums, WideSums, (double* a, int32_t* dependent),
                 (a, dependent))

void pack_tile(const double* from, int64_t stride, double* to) {
  for (int j = 0; j < kSquareTile; j += kPanel, to += kPanel * kSquareTile) {
    for (int k = 0; k < kSquareTile; ++k) std::copy_n(from + k * stride + j, kPanel, to + k * kPanel);
  }
}

GW_SIMD void pack_transposed(const double* from, int64_t stride, double* to) {
  for (int j = 0; j < kSquareTile; j += kPanel, to += kPanel * kSquareTile, from += kPanel * stride) {
    for (int k = 0; k < kSquareTile; ++k) {
      for (int c = 0; c < kPanel; ++c) to[k * kPanel + c] = from[c * stride + k];
    }
  }
}

}  // namespace gradwire::host

// Products of the large orthonormalization with factors from FP32 memory. The terms of these sums are exact
// in FP64 (a float times a float or a weight of 29 bits), so fused multiply-adds do not change their bits.

GW_ALLOW_FMA

namespace gradwire::host {
namespace {

constexpr int round_up(int count, int to) {
  return (count + to - 1) / to * to;
}

constexpr int64_t kGramPanel = kGramRows * kPanel;  // doubles

// Packs columns of rows of A into panels of kGramRows rows, with zeros up to `padded` columns.
template <typename S>
GW_INLINE void pack_columns(const float* a, int64_t rows, int rank, const int32_t* columns, int count,
                            int padded, double* to) {
  constexpr int64_t kTogether = 8;  // rows, which stay in the L1 cache for all panels
  const bool adjacent =
      columns[count - 1] - columns[0] == count - 1 && std::is_sorted(columns, columns + count);
  for (int64_t row0 = 0; row0 < rows; row0 += kTogether) {
    const int64_t end = std::min(rows, row0 + kTogether);
    for (int first = 0; first < padded; first += kPanel) {
      double* panel = to + first / kPanel * kGramPanel + row0 * kPanel;
      const int there = std::clamp(count - first, 0, kPanel);
      for (int64_t row = row0; row < end; ++row, panel += kPanel) {
        const float* const from = a + row * rank;
        if (adjacent && there == kPanel) {
#pragma GCC unroll 4
          for (int c = 0; c < kPanel; c += S::kLanes) {
            store(panel + c,
                  converted<typename S::Vec>(load<typename S::Floats>(from + columns[0] + first + c)));
          }
          continue;
        }
        for (int c = 0; c < there; ++c) panel[c] = from[columns[first + c]];
        std::fill(panel + there, panel + kPanel, 0.0);
      }
    }
  }
}

// Adds products of `rows` rows of panels to sums in `out`, or to zeros if `first`.
template <typename S, int kVecs>
GW_INLINE void add_to_gram(const double* left, const double* right, int64_t rows, bool first, double* out,
                           int64_t stride) {
  using Vec = typename S::Vec;
  Vec sums[S::kRows][S::kVecs] = {};
  if (!first) {
#pragma GCC unroll 8
    for (int i = 0; i < S::kRows; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) sums[i][v] = load<Vec>(out + i * stride + v * S::kLanes);
    }
  }
  add_products<S, 0, kVecs>(left, 1, kPanel, right, rows, sums);
#pragma GCC unroll 8
  for (int i = 0; i < S::kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) store(out + i * stride + v * S::kLanes, sums[i][v]);
  }
}

template <typename S>
GW_INLINE void gram(const GramBlock& a) {
  const int side = a.small ? S::kRows : kSquareTile;
  const int height = round_up(a.left_count, side), width = round_up(a.right_count, side);
  double* const left = a.packed;
  double* const right = a.diagonal ? left : left + kGramRows * height;
  for (int64_t row = 0; row < a.n; row += kGramRows) {
    const int64_t rows = std::min(kGramRows, a.n - row);
    const float* const from = a.a + row * a.rank;
    pack_columns<S>(from, rows, a.rank, a.left, a.left_count, round_up(height, kPanel), left);
    if (!a.diagonal) pack_columns<S>(from, rows, a.rank, a.right, a.right_count, width, right);
    for (int j = 0; j < width; j += S::kColumns) {
      const double* const y = right + j / kPanel * kGramPanel + j % kPanel;
      for (int i = a.diagonal ? j : 0; i < height; i += S::kRows) {
        const double* const x = left + i / kPanel * kGramPanel + i % kPanel;
        double* const out = a.out + i * a.stride + j;
        if (a.diagonal && i + S::kRows <= j + S::kLanes) {
          add_to_gram<S, 1>(x, y, rows, row == 0, out, a.stride);
        } else {
          add_to_gram<S, S::kVecs>(x, y, rows, row == 0, out, a.stride);
        }
      }
    }
  }
}

}  // namespace

GW_DEFINE_WIDEST(void, gram_block, gram, NarrowSums, WideSums, (const GramBlock& a), (a))
GW_DEFINE_WIDEST(void, weigh_rows, weigh, NarrowSums, WideSums, (const WeightedRows& a), (a))

void pack_weights(const double* weights, int64_t stride, int rank, double* to) {
  for (int column = 0; column < rank; column += kPanel) {
    for (int64_t k = 0; k < column + kPanel; ++k, to += kPanel) {
      std::copy_n(weights + k * stride + column, kPanel, to);
    }
  }
}

}  // namespace gradwire::host
