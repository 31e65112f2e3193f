// Shared by the kernels of orthonormalization up to rank kMaxSmallRank and above: arguments, the factor of a
// tile of the Gram matrix by FP64 tensor cores, and the order of the columns.
#pragma once

#include "kernels/powersgd/orthonormalize.h"
#include "kernels/powersgd/powersgd.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kStride = kSquareTile + 8;  // of staged tiles: against bank conflicts, and 16-byte aligned
constexpr int kPanel = 16;                // columns of a tile that one warp factors

struct OrthonormalizeArgs {
  Matrices matrices;
  Orthonormalize op;
  int pass = 0;  // above rank kMaxSmallRank
};

// A matrix of n rows.
struct TallMatrix {
  int32_t n, rank;
  const float* in;
  float* out;
};

__device__ __forceinline__ TallMatrix matrix_of(const OrthonormalizeArgs& a, const MatrixDescriptor& d) {
  const bool p = a.op.which == Factor::p;
  const int64_t offset = p ? d.p_offset : d.q_offset;
  return {p ? d.rows : d.cols, d.rank, (a.pass == 0 ? a.op.in : a.op.out) + offset, a.op.out + offset};
}

// Returns the column of A in place k of the order of elimination.
__device__ __forceinline__ int column_of(const LargeScratch& s, int pass, int k) {
  return pass == 0 ? k : s.order(pass)[k];
}

// Computes, with one warp, 16 rows of `to` from 16 rows of X and a block Y: to = sign X Y^T, plus the old
// `to` if `add`. `to` may be X. A lane reads pairs of columns: in each eight, products are added in the order
// 0 2 4 6, 1 3 5 7.
template <int kBlock>
__device__ __forceinline__ void multiply_strip(const double* x, const double* y, int64_t y_stride, bool add,
                                               double sign, double* to, int64_t stride) {
  constexpr int kTiles = kBlock / 8;
  const int lane = static_cast<int>(threadIdx.x) % 32, row = lane / 4, pair = lane % 4 * 2;
  double sum[2 * kTiles][2] = {};
  x += row * stride + pair, y += row * y_stride + pair;
#pragma unroll 2
  for (int k = 0; k < kBlock; k += 8) {
    double2 left[2], right[kTiles];
#pragma unroll
    for (int i = 0; i < 2; ++i) left[i] = *reinterpret_cast<const double2*>(x + 8 * i * stride + k);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      right[t] = *reinterpret_cast<const double2*>(y + 8 * t * y_stride + k);
    }
#pragma unroll
    for (int e = 0; e < 2 * kTiles; ++e) multiply_add(sum[e], left[e / kTiles].x, right[e % kTiles].x);
#pragma unroll
    for (int e = 0; e < 2 * kTiles; ++e) multiply_add(sum[e], left[e / kTiles].y, right[e % kTiles].y);
  }
  __syncwarp();
#pragma unroll
  for (int e = 0; e < 2 * kTiles; ++e) {
    double* const at = to + (e / kTiles * 8 + row) * stride + e % kTiles * 8 + pair;
    const double2 old = add ? *reinterpret_cast<double2*>(at) : make_double2(0.0, 0.0);
    *reinterpret_cast<double2*>(at) = make_double2(fma(sign, sum[e][0], old.x), fma(sign, sum[e][1], old.y));
  }
}

// Eliminates the columns of block `step` of a square of blocks. The block on the diagonal already holds
// L_ss^-T, and `inverse` L_ss^-1. Blocks below the diagonal become L in this column and lose its products in
// later columns. Blocks above the diagonal become L^-T: they are multiplied in the same way, but begin as 0.
template <int kBlock, int kWarps>
__device__ __forceinline__ void eliminate(double* square, int64_t stride, int blocks, int step,
                                          const double* inverse) {
  constexpr int kStrips = kBlock / 16;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const auto strip = [&](int row, int column, int index) {
    return square + (row * kBlock + index * 16) * stride + column * kBlock;
  };
  for (int item = warp; item < (blocks - 1) * kStrips; item += kWarps) {
    const int row = item / kStrips + (item / kStrips >= step ? 1 : 0);
    double* const to = strip(row, step, item % kStrips);
    multiply_strip<kBlock>(to, inverse, kStride, false, 1.0, to, stride);
  }
  __syncthreads();
  int item = 0;
  for (int column = step + 1; column < blocks; ++column) {
    for (int row = 0; row < blocks; row = row == step ? column : row + 1) {
      for (int i = 0; i < kStrips; ++i) {
        if (item++ % kWarps != warp) continue;
        multiply_strip<kBlock>(strip(row, step, i), strip(column, step, 0), stride, row != step, -1.0,
                               strip(row, column, i), stride);
      }
    }
  }
  __syncthreads();
}

// Factors a block of kPanel columns with one warp: block = L L^T. Sets `block` to L^-T and `inverse` to L^-1,
// with zeros for dependent columns. Gauss elimination: a lane holds a column of the block or, from lane 16
// on, of the identity; v[0] is its element in the pivot's row. Columns from `count` on are of the identity.
// `inverse_square` is 1 / norm^2 of the lane's column of A. Returns the smallest pivot, or 0 if a column is
// dependent.
__device__ __forceinline__ double factor_panel(double* block, double* inverse, int count,
                                               double inverse_square, int32_t* dependent) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  const int lane = static_cast<int>(threadIdx.x) % 32, column = lane % kPanel;
  const bool of_identity = lane >= kPanel;
  double v[kPanel], smallest = 1.0;
#pragma unroll
  for (int i = 0; i < kPanel; ++i) {
    v[i] = of_identity ? (i == column ? 1.0 : 0.0) : block[i * kStride + column];
  }
#pragma unroll
  for (int half = 0; half < kPanel; half += kPanel / 2) {
#pragma unroll 1  // the code of all pivots would not stay in the instruction cache
    for (int j = half; j < half + kPanel / 2; ++j) {
      double row = j == column ? 1.0 : 0.0;
      bool depends = false;
      if (j < count) {
        const double pivot = __shfl_sync(kAllLanes, v[0], j);
        const double share = pivot * __shfl_sync(kAllLanes, inverse_square, j);
        depends = !(share > kDependentPivot);
        smallest = depends ? 0.0 : fmin(smallest, share);
        const double inverse_root = depends ? 0.0 : rsqrt(pivot);
        row = v[0] * inverse_root;
        const double multiple = row * inverse_root;
#pragma unroll
        for (int i = 1; i < kPanel - half; ++i) v[i - 1] = v[i] - __shfl_sync(kAllLanes, v[i], j) * multiple;
      }
      if (of_identity) inverse[j * kStride + column] = block[column * kStride + j] = row;
      if (lane == j) dependent[j] = depends ? 1 : 0;
    }
  }
  return smallest;
}

// Factors `panels` panels of a tile: square = L L^T. Sets the blocks on and above the diagonal to L^-T, and
// those on the diagonal of `inverse` to L^-1. Columns from `rank` on are of the identity. Returns the
// smallest pivot, or 0 if a column is dependent, to the first warp. Rows of both tiles are kStride apart.
template <int kWarps>
__device__ __forceinline__ double factor_panels(double* square, double* inverse, int panels, int rank,
                                                const double* inverse_squares, int32_t* dependent) {
  const int thread = static_cast<int>(threadIdx.x);
  double smallest = 1.0;
  for (int step = 0; step < panels; ++step) {
    const int first = step * kPanel, corner = first * (kStride + 1);
    if (thread < 32) {
      smallest = fmin(smallest, factor_panel(square + corner, inverse + corner, rank - first,
                                             inverse_squares[first + thread % kPanel], dependent + first));
    }
    __syncthreads();
    eliminate<kPanel, kWarps>(square, kStride, panels, step, inverse + corner);
  }
  return smallest;
}

// Orders the columns for the next pass: columns that were ever re-seeded come last. dependent[k] becomes 1 +
// the number of earlier draws of a dependent column, else 0. `drawn` is shared memory.
__device__ __forceinline__ void count_draws(const LargeScratch& s, int pass, int rank, int* drawn) {
  const int thread = static_cast<int>(threadIdx.x);
  int32_t* const next = s.order(pass + 1);
  if (thread == 0) *drawn = pass;  // an order changes only after a draw in an earlier pass
  __syncthreads();
  for (int k = thread; k < rank; k += static_cast<int>(blockDim.x)) {
    const int column = column_of(s, pass, k);
    const int before = pass == 0 ? 0 : s.attempts[column];
    if (s.dependent[k] != 0) {
      s.dependent[k] = before + 1;
      *drawn = 1;
    }
    s.attempts[column] = before + (s.dependent[k] != 0 ? 1 : 0);
    next[k] = column;
  }
  __syncthreads();
  if (thread != 0 || *drawn == 0) return;
  int at = 0;
  for (int pass_over = 0; pass_over < 2; ++pass_over) {
    for (int k = 0; k < rank; ++k) {
      const int column = column_of(s, pass, k);
      if ((s.attempts[column] != 0) == (pass_over != 0)) next[at++] = column;
    }
  }
}

}  // namespace
}  // namespace gradwire::cuda
