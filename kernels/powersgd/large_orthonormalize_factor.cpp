// Tiles of the Cholesky factor of the large orthonormalization. Products and additions are rounded
// separately, so that all processors compute the same bits.
#include <algorithm>
#include <cmath>

#include "kernels/math/orthonormalize.h"
#include "kernels/powersgd/large_orthonormalize_simd.h"
#include "kernels/simd/simd.h"
#include "kernels/simd/vector.h"

namespace gradwire::host {
namespace {

using Vec = double __attribute__((vector_size(32)));
constexpr int kLanesOfVec = 4;
constexpr int kTileRows = 4, kTileVecs = 2;

}  // namespace

GW_SIMD void add_tile_product(double sign, const double* a, const double* b_transposed, double* c,
                              int64_t a_stride, int64_t c_stride) {
  for (int i0 = 0; i0 < kSquareTile; i0 += kTileRows) {
    for (int j = 0; j < kSquareTile; j += kTileVecs * kLanesOfVec) {
      Vec sums[kTileRows][kTileVecs] = {};
      for (int k = 0; k < kSquareTile; ++k) {
        Vec right[kTileVecs];
        for (int v = 0; v < kTileVecs; ++v) {
          right[v] = load<Vec>(b_transposed + k * kSquareTile + j + v * kLanesOfVec);
        }
        for (int i = 0; i < kTileRows; ++i) {
          const double left = a[(i0 + i) * a_stride + k];
          for (int v = 0; v < kTileVecs; ++v) sums[i][v] += left * right[v];
        }
      }
      for (int i = 0; i < kTileRows; ++i) {
        for (int v = 0; v < kTileVecs; ++v) {
          double* const to = c + (i0 + i) * c_stride + j + v * kLanesOfVec;
          store(to, load<Vec>(to) + sign * sums[i][v]);
        }
      }
    }
  }
}

GW_SIMD double factor_tile(double* a, int32_t* dependent) {
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
    double* const row_j = inverse + j * kSize;
    for (int c = 0; c < kSize; ++c) row_j[c] *= inverse_root;
    for (int i = 0; i < kSize; ++i) l[i] = depends || i <= j ? 0.0 : a[i * kSize + j] * inverse_root;
    for (int i = j + 1; i < kSize; ++i) {
      double* const row = a + i * kSize;
      double* const inverse_row = inverse + i * kSize;
      const double l_i = l[i];
      for (int c = 0; c < kSize; ++c) row[c] -= l_i * l[c];
      for (int c = 0; c < kSize; ++c) inverse_row[c] -= l_i * row_j[c];
    }
  }
  std::copy(inverse, inverse + kSize * kSize, a);
  return smallest;
}

}  // namespace gradwire::host
