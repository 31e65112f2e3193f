// Tiles of the Cholesky factor of the large orthonormalization. Products and additions are rounded
// separately, so that all processors compute the same bits.
#include <algorithm>
#include <cmath>

#include "kernels/math/orthonormalize.h"
#include "kernels/powersgd/large_orthonormalize_simd.h"

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

GW_SIMD void multiply_narrow(const TileProduct& p) {
  multiply<NarrowSums>(p);
}
GW_AVX512 void multiply_wide(const TileProduct& p) {
  multiply<WideSums>(p);
}
GW_SIMD double factor_narrow(double* a, int32_t* dependent) {
  return factor<NarrowSums>(a, dependent);
}
GW_AVX512 double factor_wide(double* a, int32_t* dependent) {
  return factor<WideSums>(a, dependent);
}

}  // namespace

void multiply_tiles(const TileProduct& p) {
  has_avx512() ? multiply_wide(p) : multiply_narrow(p);
}

double factor_tile(double* a, int32_t* dependent) {
  return has_avx512() ? factor_wide(a, dependent) : factor_narrow(a, dependent);
}

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
