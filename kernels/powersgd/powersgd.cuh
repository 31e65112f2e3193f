// Shared by the PowerSGD kernels: finding a block's matrix, four-column accesses, register tiles, and
// products by FP64 tensor cores.
//
// A thread owns four columns of a row. In an aligned matrix the four columns are adjacent and take one
// 16-byte access. Otherwise they are `spread` columns apart, so that each of a warp's four 4-byte accesses is
// contiguous.
#pragma once

#include <algorithm>
#include <cfloat>

#include "kernels/cuda/copies.cuh"
#include "kernels/math/small_float.h"
#include "kernels/powersgd/powersgd.h"
#include "runtime/device/launch.cuh"

namespace gradwire::cuda {

struct Matrices {
  const MatrixDescriptor* descriptors;
  const MatrixBlocks* starts;  // count + 1
  int count;
};

inline Matrices matrices_of(const MatrixTable& table) {
  return {table.device(), table.blocks(), table.count()};
}

// Calls run.template operator()<kRank>() for the kernel of ranks up to kMaxNarrowRank.
template <typename Run>
void with_narrow_rank(int rank, const Run& run) {
  if (rank <= 1) return run.template operator()<1>();
  rank <= 2 ? run.template operator()<2>() : run.template operator()<kMaxNarrowRank>();
}

// Returns the matrix of `block`. All threads of the block call it; `found` is shared; ends with a barrier.
__device__ __forceinline__ int find_matrix(const Matrices& matrices, int32_t MatrixBlocks::*first,
                                           int32_t block, int* found) {
  for (int m = static_cast<int>(threadIdx.x); m < matrices.count; m += static_cast<int>(blockDim.x)) {
    if (matrices.starts[m].*first <= block && block < matrices.starts[m + 1].*first) *found = m;
  }
  __syncthreads();
  return *found;
}

__device__ __forceinline__ bool aligned16(const void* p) {
  return (reinterpret_cast<uintptr_t>(p) & 15) == 0;
}

// A thread's columns within a strip of 4 * spread columns.
template <bool kVector>
struct Quad {
  int spread, index;  // index in 0 .. spread - 1
  __device__ __forceinline__ int column(int c) const { return kVector ? 4 * index + c : index + c * spread; }

  // Loads the strip's columns at `row`; columns from `limit` on are 0. With kVector, limit is a multiple of
  // 4.
  __device__ __forceinline__ void load(const float* row, int limit, float (&x)[4]) const {
    if constexpr (kVector) {
      float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (4 * index < limit) v = *reinterpret_cast<const float4*>(row + 4 * index);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) x[c] = column(c) < limit ? row[column(c)] : 0.0f;
    }
  }
  __device__ __forceinline__ void store(float* row, int limit, const float (&x)[4]) const {
    if constexpr (kVector) {
      if (4 * index < limit)
        *reinterpret_cast<float4*>(row + 4 * index) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (column(c) < limit) row[column(c)] = x[c];
      }
    }
  }
};

// Replaces E in `m` by M. `keep` is the value for the residual: E where the gradient is not finite, the
// largest float where only the sum is not finite.
__device__ __forceinline__ void add_gradient(const float (&gradient)[4], float (&m)[4], float (&keep)[4]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float e = m[c], sum = gradient[c] + e;
    keep[c] = is_finite(gradient[c]) ? fminf(fmaxf(sum, -FLT_MAX), FLT_MAX) : e;
    m[c] = sum;
  }
}

// Forms M in four columns of kBatch rows, `step` elements apart from `residual` on. `m` holds the gradient
// and receives M, which error feedback stores. limit(i): the number of columns of row i. pending_p(i, k) and
// pending_q(k, q): the pending factors, of `rank` columns; 0 if nothing is pending. All loads come before the
// first store: a store waits for its value, and later loads would wait for the store.
template <int kBatch, bool kVector, typename Limit, typename PendingP, typename PendingQ>
__device__ __forceinline__ void form_rows(const Quad<kVector>& quad, float* residual, int64_t step,
                                          const Limit& limit, int rank, const PendingP& pending_p,
                                          const PendingQ& pending_q, float (*m)[4]) {
  float e[kBatch][4];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) quad.load(residual + i * step, limit(i), e[i]);
#pragma unroll 1
  for (int k = 0; k < rank; ++k) {
    float q[4];
    pending_q(k, q);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float p = pending_p(i, k);
#pragma unroll
      for (int c = 0; c < 4; ++c) e[i][c] = fmaf(p, q[c], e[i][c]);
    }
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    float keep[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) e[i][c] = is_finite(e[i][c]) ? e[i][c] : 0.0f;
    add_gradient(m[i], e[i], keep);
#pragma unroll
    for (int c = 0; c < 4; ++c) m[i][c] = e[i][c];
    quad.store(residual + i * step, limit(i), keep);
  }
}

// Register tiles of higher ranks: a warp computes 32 rows by 32 columns, a lane rows row + 4 i and the four
// columns of Quad{8, quad}. Lanes that differ in bit 0 read the same rows, lanes that differ in bit 1 the
// same columns; a multiprocessor then serves a 16-byte read of a warp in two cycles, not four.
constexpr int kWarpTile = 32;
constexpr int kPitch = kWarpTile + 4;  // floats between rows in shared memory: against bank conflicts
struct TileLane {
  int row, quad;
  __device__ __forceinline__ TileLane() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    row = (lane >> 1 & 1) | (lane >> 3 & 2);
    quad = (lane & 1) | (lane >> 1 & 6);
  }
};

// A lane's part of a warp's tile of M.
template <bool kVector>
struct MatrixTile {
  Quad<kVector> quad;
  int64_t at;         // the lane's first element in the gradient and residual arrays
  int rows, columns;  // of the matrix, from the lane's first row and the tile's first column on
  int cols;

  __device__ __forceinline__ MatrixTile(const MatrixDescriptor& d, const TileLane& lane, int row,
                                        int rows_left, int column, int columns_left)
      : quad{8, lane.quad},
        at(d.offset + static_cast<int64_t>(row) * d.cols + column + quad.column(0)),
        rows(rows_left),
        columns(columns_left),
        cols(d.cols) {}
  __device__ __forceinline__ bool there(int i, int c) const {
    return 4 * i < rows && quad.column(c) < columns;
  }
  __device__ __forceinline__ int64_t step() const { return 4 * int64_t{cols}; }  // between the lane's rows

  // Loads the lane's rows; elements outside the matrix are zero.
  template <int kRows>
  __device__ __forceinline__ void load(const float* from, float (&x)[kRows][4]) const {
    from += at;
#pragma unroll
    for (int i = 0; i < kRows; ++i, from += step()) {
      if constexpr (kVector) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (there(i, 0)) v = *reinterpret_cast<const float4*>(from);
        x[i][0] = v.x, x[i][1] = v.y, x[i][2] = v.z, x[i][3] = v.w;
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c) x[i][c] = there(i, c) ? from[8 * c] : 0.0f;
      }
    }
  }
  // Stores row i of the lane's rows, which begins at `to`.
  __device__ __forceinline__ void store_row(float* to, int i, const float (&x)[4]) const {
    if constexpr (kVector) {
      // A plain store becomes four here.
      if (there(i, 0)) __stwb(reinterpret_cast<float4*>(to), make_float4(x[0], x[1], x[2], x[3]));
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (there(i, c)) to[8 * c] = x[c];
      }
    }
  }
};

// Stages up to 32 columns of kRows rows of an array in shared memory, as rows of kPitch floats, in the
// background: `columns` from `from` on, then zeros up to a multiple of 4. Rows from `limit` on are zero. With
// kByQuads, row 4 q + c of 32 is at place q + 8 c, so that a lane's rows are eight places apart.
template <int kRows, bool kVector, bool kByQuads = false>
__device__ __forceinline__ void stage_rows(const float* from, int stride, int columns, int limit, float* to) {
  constexpr int kWidth = kVector ? 4 : 1, kStep = 256 * kWidth / kWarpTile;
  const int unit = static_cast<int>(threadIdx.x) % (kWarpTile / kWidth) * kWidth;
  const int first = static_cast<int>(threadIdx.x) / (kWarpTile / kWidth);
  if (unit >= (columns + 3) / 4 * 4) return;
  const int rows = unit < columns ? limit - first : 0;
  from += static_cast<int64_t>(first) * stride + unit, to += unit;
#pragma unroll kVector ? 4 : 1
  for (int row = 0; row < kRows; row += kStep) {
    const int at = first + row, place = kByQuads ? (at & ~31) + at % 4 * 8 + at / 4 % 8 : at;
    copy_async<4 * kWidth>(to + place * kPitch, from + static_cast<int64_t>(row) * stride, row < rows);
  }
}

// Adds P Q^T to a lane's tile: `p` and `q` are its first staged row of each; 4-column steps up to `padded`.
template <int kRows>
__device__ __forceinline__ void add_outer_product(const float* p, const float* q, int padded,
                                                  float (&sum)[kRows][4]) {
#pragma unroll 1
  for (int k = 0; k < padded; k += 4) {
    float4 right[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) right[c] = *reinterpret_cast<const float4*>(q + 8 * c * kPitch + k);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float4 left = *reinterpret_cast<const float4*>(p + 4 * i * kPitch + k);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sum[i][c] = fmaf(left.x, right[c].x, sum[i][c]);
        sum[i][c] = fmaf(left.y, right[c].y, sum[i][c]);
        sum[i][c] = fmaf(left.z, right[c].z, sum[i][c]);
        sum[i][c] = fmaf(left.w, right[c].w, sum[i][c]);
      }
    }
  }
}

// Adds a b to c, for tiles of 8 x 4, 4 x 8 and 8 x 8. Lane l holds a[l / 4][l % 4], b[l % 4][l / 4],
// c[l / 4][2 (l % 4)], and the element of c after it.
__device__ __forceinline__ void multiply_add(double (&c)[2], double a, double b) {
#ifdef GRADWIRE_SIMT
  static double left[1024], right[1024];  // 2 barriers; as shuffles, 12
  const int thread = static_cast<int>(threadIdx.x), row = thread / 4 * 4;
  left[thread] = a, right[thread] = b;
  __syncwarp();
  for (int k = 0; k < 4; ++k) {
    for (int j = 0; j < 2; ++j) {
      c[j] = fma(left[row + k], right[thread / 32 * 32 + (thread % 4 * 2 + j) * 4 + k], c[j]);
    }
  }
  __syncwarp();
#else
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(c[0]), "+d"(c[1])
      : "d"(a), "d"(b));
#endif
}

}  // namespace gradwire::cuda
