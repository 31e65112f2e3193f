// CholeskyQR on CUDA above rank kMaxSmallRank. A pass is three launches: tiles of the Gram matrices, a
// factor per block, and 64 rows of the result per block. The host cannot know how many passes the columns
// need, so it launches the most that can be needed; blocks of finished matrices end at once.
//
// Limit: FP64 tensor cores, n r^2 multiply-adds per matrix for the Gram matrix and the rows together, and r^3
// for the factor on one SM, which also waits for r pivots, one after the other. The algorithm is that of
// large_orthonormalize_host.cpp. Sums have a fixed order.
#include "kernels/powersgd/orthonormalize.h"

#include <algorithm>

#include "kernels/powersgd/powersgd.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kWarpSide = 32;  // rows and columns of a warp's sums, in the Gram matrix and the result
constexpr int kGramRows = 32, kGramStages = 3;
constexpr int kFloatStride = kSquareTile + 8;    // of staged columns of A: against bank conflicts
constexpr int kSide = kGramRows * kFloatStride;  // floats
constexpr int kRows = 64;                        // rows of the result per block
constexpr int kStride = kSquareTile + 8;  // of staged tiles: against bank conflicts, and 16-byte aligned
constexpr int kPanel = 16;                // columns of a tile that one warp factors
// One pass for well-conditioned columns, two up to a condition number of 1e8, two more after unlucky draws.
constexpr int kPasses = 6;

struct LargeArgs {
  Matrices matrices;
  Factor which;
  const float* in;
  float* out;
  int32_t* flags;
  bool keep_flags;
  uint64_t seed;
  const uint64_t* step;
  double* scratch;
  int pass;
};

struct LargeMatrix {
  int32_t n, rank;
  const float* in;
  float* out;
};

__device__ __forceinline__ LargeMatrix matrix_of(const LargeArgs& a, const MatrixDescriptor& d) {
  const bool p = a.which == Factor::p;
  const int64_t offset = p ? d.p_offset : d.q_offset;
  return {p ? d.rows : d.cols, d.rank, (a.pass == 0 ? a.in : a.out) + offset, a.out + offset};
}

__device__ __forceinline__ int column_of(const LargeArgs& a, const LargeScratch& s, int k) {
  return a.pass == 0 ? k : s.order(a.pass)[k];
}

// Adds X Y to a warp's sums, for 32 x 4 and 4 x 32 elements: a lane's element of X in each of 4 tiles, `step`
// apart, and of Y.
__device__ __forceinline__ void add_products(const float* x, int step, const double (&y)[4],
                                             double (&sum)[4][4][2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const double left = x[i * step];
#pragma unroll
    for (int t = 0; t < 4; ++t) multiply_add(sum[i][t], left, y[t]);
  }
}

// Stages rows of a tile's columns of A in the background: to[row][c] = A[row0 + row][order[first + c]]; 0
// outside A.
__device__ __forceinline__ void stage_columns(const LargeMatrix& m, int column, bool there, int32_t row0,
                                              float* to) {
  const int first = static_cast<int>(threadIdx.x) / kSquareTile;
  const float* from = m.in + static_cast<int64_t>(row0 + first) * m.rank + column;
  to += first * kFloatStride + static_cast<int>(threadIdx.x) % kSquareTile;
#pragma unroll
  for (int row = 0; row < kGramRows; row += kThreads / kSquareTile) {
    copy_async<4>(to + row * kFloatStride, from + static_cast<int64_t>(row) * m.rank,
                  there && row0 + first + row < m.n);
  }
}

// A block computes a tile. Each quarter of the tile is the sum of two warps, which take turns of 16 rows.
__global__ void __launch_bounds__(kThreads, 2) gram_kernel(const __grid_constant__ LargeArgs a) {
  GW_DYNAMIC_SHARED(float, staged);  // [stage][side][row][column], later the second warp's sums
  const int matrix = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
  const MatrixDescriptor d = a.matrices.descriptors[matrix];
  if (d.rank <= kMaxSmallRank || static_cast<int>(blockIdx.x) >= lower_tiles(tiles_of(d.rank))) return;
  const LargeScratch s(a.scratch + d.scratch, d.rank);
  if (a.pass > 0 ? *s.state != LargeState::active : a.keep_flags && a.flags[matrix] != 0) return;
  const LargeMatrix m = matrix_of(a, d);
  int tile_row = 0, tile_column = 0;
  split_lower(static_cast<int>(blockIdx.x), tile_row, tile_column);
  const bool diagonal = tile_row == tile_column;
  int first[2] = {tile_row * kSquareTile + thread % kSquareTile,
                  tile_column * kSquareTile + thread % kSquareTile};
  bool there[2] = {first[0] < m.rank, first[1] < m.rank};
  for (int side = 0; side < 2; ++side) first[side] = there[side] ? column_of(a, s, first[side]) : 0;
  const auto stage = [&](int32_t row0) {
    float* const to = staged + row0 / kGramRows % kGramStages * 2 * kSide;
    if (row0 < m.n) stage_columns(m, first[0], there[0], row0, to);
    if (row0 < m.n && !diagonal) stage_columns(m, first[1], there[1], row0, to + kSide);
    end_copies();
  };
  const int lane = thread % 32, warp = thread / 32, half = warp % 2;
  const int row = warp / 4 * kWarpSide, column = warp / 2 % 2 * kWarpSide;
  double sum[4][4][2] = {};
  for (int i = 0; i < kGramStages - 1; ++i) stage(i * kGramRows);
  for (int32_t row0 = 0; row0 < m.n; row0 += kGramRows) {
    wait_for_copies<kGramStages - 2>();
    __syncthreads();
    stage(row0 + (kGramStages - 1) * kGramRows);
    if (diagonal && row < column) continue;  // above the diagonal
    const float* left = staged + row0 / kGramRows % kGramStages * 2 * kSide;
    left += (half * (kGramRows / 2) + lane % 4) * kFloatStride + lane / 4;
#pragma unroll
    for (int k = 0; k < kGramRows / 2; k += 4, left += 4 * kFloatStride) {
      double right[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) right[t] = left[(diagonal ? 0 : kSide) + column + 8 * t];
      add_products(left + row, 8, right, sum);
    }
  }
  wait_for_copies<0>();
  __syncthreads();
  double* const other = reinterpret_cast<double*>(staged) + warp / 2 * kWarpSide * kWarpSide + lane;
  if (half == 1) {
#pragma unroll
    for (int e = 0; e < 32; ++e) other[32 * e] = sum[e / 8][e / 2 % 4][e % 2];
  }
  __syncthreads();
  if (half == 1) return;
  double* const out =
      s.tile(tile_row, tile_column) + static_cast<int64_t>(row + lane / 4) * s.size + column + lane % 4 * 2;
#pragma unroll
  for (int e = 0; e < 32; e += 2) {
    *reinterpret_cast<double2*>(out + e / 8 * 8 * s.size + e / 2 % 4 * 8) =
        make_double2(sum[e / 8][e / 2 % 4][0] + other[32 * e], sum[e / 8][e / 2 % 4][1] + other[32 * e + 32]);
  }
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
template <int kBlock>
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

// Factors kPanel columns with one warp: block = L L^T. Sets `block` to L^-T and `inverse` to L^-1, with zeros
// for dependent columns. Gauss elimination: a lane holds a column of the block or, from lane 16 on, of the
// identity. `inverse_square` is 1 / norm^2 of the lane's column of A. Returns the smallest pivot, or 0 if a
// column is dependent.
__device__ __forceinline__ double factor_panel(double* block, double* inverse, double inverse_square,
                                               int32_t* dependent) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  const int lane = static_cast<int>(threadIdx.x) % 32, column = lane % kPanel;
  const bool of_identity = lane >= kPanel;
  double v[kPanel], smallest = 1.0;
  int dependents = 0;
#pragma unroll
  for (int i = 0; i < kPanel; ++i) {
    v[i] = of_identity ? (i == column ? 1.0 : 0.0) : block[i * kStride + column];
  }
#pragma unroll
  for (int j = 0; j < kPanel; ++j) {
    const double pivot = __shfl_sync(kAllLanes, v[j], j);
    const double share = pivot * __shfl_sync(kAllLanes, inverse_square, j);
    const bool depends = !(share > kDependentPivot);
    smallest = depends ? 0.0 : fmin(smallest, share);
    dependents |= depends ? 1 << j : 0;
    const double inverse_root = depends ? 0.0 : rsqrt(pivot);
    v[j] *= inverse_root;
    const double multiple = v[j] * inverse_root;
#pragma unroll
    for (int i = j + 1; i < kPanel; ++i) v[i] -= __shfl_sync(kAllLanes, v[i], j) * multiple;
  }
  if (of_identity) {
#pragma unroll
    for (int i = 0; i < kPanel; ++i) inverse[i * kStride + column] = block[column * kStride + i] = v[i];
    dependent[column] = dependents >> column & 1;
  }
  return smallest;
}

// Factors tile `j` on the diagonal, sets it to L_jj^-T, and `inverse` to L_jj^-1. Returns the smallest pivot,
// or 0 if a column is dependent, to the first warp. `staged` and `inverse` are tiles of rows kStride apart.
__device__ __forceinline__ double factor_tile(const LargeScratch& s, int rank, int j, double* staged,
                                              double* inverse) {
  const int thread = static_cast<int>(threadIdx.x);
  double* const tile = s.tile(j, j);
#pragma unroll
  for (int item = thread; item < kSquareTile * kSquareTile / 2; item += kThreads) {
    const int row = item / (kSquareTile / 2), column = item % (kSquareTile / 2) * 2;
    double2 x = *reinterpret_cast<const double2*>(tile + static_cast<int64_t>(row) * s.size + column);
    if (j * kSquareTile + row >= rank && row / 2 == column / 2)
      (row == column ? x.x : x.y) = 1.0;  // pads with the identity
    *reinterpret_cast<double2*>(staged + row * kStride + column) = x;
  }
  __syncthreads();
  double smallest = 1.0;
  for (int step = 0; step < kSquareTile / kPanel; ++step) {
    const int first = step * kPanel, at = j * kSquareTile + first;
    if (thread < 32) {
      const double pivot = factor_panel(staged + first * (kStride + 1), inverse + first * (kStride + 1),
                                        s.scale[at + thread % kPanel], s.dependent + at);
      smallest = fmin(smallest, pivot);
    }
    __syncthreads();
    eliminate<kPanel>(staged, kStride, kSquareTile / kPanel, step, inverse + first * (kStride + 1));
  }
  for (int item = thread; item < kSquareTile * kSquareTile; item += kThreads) {
    const int row = item / 512 * 8 + item % 32 / 4, column = item / 32 % 16 * 4 + item % 4;
    const double weight = row / kPanel <= column / kPanel ? staged[row * kStride + column] : 0.0;
    inverse[column * kStride + row] = tile[static_cast<int64_t>(row) * s.size + column] = weight;
  }
  __syncthreads();
  return smallest;
}

// Orders the columns for the next pass: columns that were ever re-seeded come last. dependent[k] becomes 1 +
// the number of earlier draws of a dependent column, else 0. `drawn` is shared memory.
__device__ __forceinline__ void count_draws(const LargeArgs& a, const LargeScratch& s, int rank, int* drawn) {
  const int thread = static_cast<int>(threadIdx.x);
  int32_t* const next = s.order(a.pass + 1);
  if (thread == 0) *drawn = a.pass;  // an order changes only after a draw in an earlier pass
  __syncthreads();
  for (int k = thread; k < rank; k += kThreads) {
    const int column = column_of(a, s, k);
    const int before = a.pass == 0 ? 0 : s.attempts[column];
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
      const int column = column_of(a, s, k);
      if ((s.attempts[column] != 0) == (pass_over != 0)) next[at++] = column;
    }
  }
}

__global__ void __launch_bounds__(kThreads) factor_kernel(const __grid_constant__ LargeArgs a) {
  GW_DYNAMIC_SHARED(double, shared);
  __shared__ int infinite[1];  // later: whether a column was drawn
  const int matrix = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const MatrixDescriptor d = a.matrices.descriptors[matrix];
  if (d.rank <= kMaxSmallRank) return;
  const LargeScratch s(a.scratch + d.scratch, d.rank);
  const bool done = a.pass > 0 ? *s.state != LargeState::active : a.keep_flags && a.flags[matrix] != 0;
  if (thread == 0) infinite[0] = 0;
  __syncthreads();
  for (int k = thread; !done && k < s.size; k += kThreads) {
    const double square = s.square[static_cast<int64_t>(k) * s.size + k];
    s.scale[k] = k >= d.rank ? 1.0 : square > 0.0 ? 1.0 / square : 0.0;
    // Squares of floats are finite in double, and so is their sum, unless there is a NaN or an Inf.
    if (!(square < 1e300)) infinite[0] = 1;
  }
  __syncthreads();
  if (done || infinite[0] != 0) {
    if (thread == 0) *s.state = LargeState::done;
    if (thread == 0 && !done) a.flags[matrix] = 1;
    return;
  }
  if (thread == 0 && a.pass == 0 && !a.keep_flags) a.flags[matrix] = 0;
  double* const inverse = shared + kSquareTile * kStride;
  double smallest = 1.0;
  for (int j = 0; j < s.size / kSquareTile; ++j) {
    smallest = fmin(smallest, factor_tile(s, d.rank, j, shared, inverse));
    eliminate<kSquareTile>(s.square, s.size, s.size / kSquareTile, j, inverse);
  }
  count_draws(a, s, d.rank, infinite);
  if (thread == 0) {
    *s.state = smallest >= kFinalPivotOfRoundedWeights ? LargeState::last_rows : LargeState::active;
  }
}

// Returns the distance of staged rows, in floats: a multiple of 8, plus 4 against bank conflicts.
__host__ __device__ __forceinline__ int row_stride(int rank) {
  return (rank + 7) / 8 * 8 + 4;
}

// Computes, with one warp, 32 x 32 elements of in * weights from the staged rows of `in`; draws dependent
// columns.
__device__ __forceinline__ void weigh(const LargeArgs& a, const MatrixDescriptor& d, const LargeMatrix& m,
                                      const LargeScratch& s, const float* rows, int32_t row0, int column) {
  const int lane = static_cast<int>(threadIdx.x) % 32, stride = row_stride(m.rank);
  const float* const x = rows + lane / 4 * stride + lane % 4;
  const double* weights = s.square + static_cast<int64_t>(lane % 4) * s.size + column + lane / 4;
  double sum[4][4][2] = {}, next[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) next[t] = weights[8 * t];
  const int end = min(column + kWarpSide, m.rank);
#pragma unroll 1
  for (int k = 0; k < end; k += 4) {
    double w[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) w[t] = exact_weight(next[t]);
    weights += k + 4 < end ? 4 * int64_t{s.size} : 0;
#pragma unroll
    for (int t = 0; t < 4; ++t) next[t] = weights[8 * t];
    add_products(x + k, 8 * stride, w, sum);
  }
  const uint64_t step = a.step != nullptr ? *a.step : 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int k = column + e / 2 * 8 + lane % 4 * 2 + e % 2;
    if (k >= m.rank) continue;
    const int c = column_of(a, s, k), draws = s.dependent[k];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t at = row0 + 8 * i + lane / 4;
      if (at >= m.n) continue;
      const float value =
          draws == 0 ? static_cast<float>(sum[i][e / 2][e % 2])
                     : reseed_value(a.seed, step, d.seed_id, static_cast<int>(a.which), c, draws - 1, at);
      m.out[static_cast<int64_t>(at) * m.rank + c] = value;
    }
  }
}

// Stages rows of A in the background, with columns in the order of elimination; 0 outside A.
__device__ __forceinline__ void stage_ordered_rows(const LargeArgs& a, const LargeMatrix& m,
                                                   const LargeScratch& s, int32_t row0, float* rows) {
  const int warp = static_cast<int>(threadIdx.x) / 32, stride = row_stride(m.rank);
  for (int k = static_cast<int>(threadIdx.x) % 32; k < stride; k += 32) {
    const float* const from = m.in + (k < m.rank ? column_of(a, s, k) : 0);
    for (int row = warp; row < kRows; row += kWarps) {
      copy_async<4>(rows + row * stride + k, from + static_cast<int64_t>(row0 + row) * m.rank,
                    k < m.rank && row0 + row < m.n);
    }
  }
  end_copies();
}

__global__ void __launch_bounds__(kThreads, 2) rows_kernel(const __grid_constant__ LargeArgs a) {
  GW_DYNAMIC_SHARED(float, rows);
  const MatrixDescriptor d = a.matrices.descriptors[blockIdx.y];
  const LargeMatrix m = matrix_of(a, d);
  const LargeScratch s(a.scratch + d.scratch, d.rank);
  int32_t row0 = static_cast<int32_t>(blockIdx.x) * kRows;
  if (d.rank <= kMaxSmallRank || row0 >= m.n || *s.state == LargeState::done) return;
  constexpr int kHigh = kRows / kWarpSide;
  const int warp = static_cast<int>(threadIdx.x) / 32, wide = (m.rank + kWarpSide - 1) / kWarpSide;
#pragma unroll 1
  for (; row0 < m.n; row0 += static_cast<int32_t>(gridDim.x) * kRows) {
    stage_ordered_rows(a, m, s, row0, rows);
    wait_for_copies<0>();
    __syncthreads();
    // The last columns, which take longest, first; then the other way round, for warps of equal work.
    for (int turn = 0; turn * kWarps < kHigh * wide; ++turn) {
      const int item = turn * kWarps + (turn % 2 == 0 ? warp : kWarps - 1 - warp);
      if (item >= kHigh * wide) continue;
      const int row = item % kHigh * kWarpSide, column = (wide - 1 - item / kHigh) * kWarpSide;
      weigh(a, d, m, s, rows + row * row_stride(m.rank), row0 + row, column);
    }
    __syncthreads();
  }
}

}  // namespace

void orthonormalize_large(CudaStream stream, const Orthonormalize& op) {
  const int rank = op.table->max_rank();
  if (rank <= kMaxSmallRank) return;
  int32_t n = 0;
  for (const MatrixDescriptor& d : op.table->host()) n = std::max(n, op.which == Factor::p ? d.rows : d.cols);
  LargeArgs a{.matrices = matrices_of(*op.table),
              .which = op.which,
              .in = op.in,
              .out = op.out,
              .flags = op.flags,
              .keep_flags = op.keep_flags,
              .seed = op.seed,
              .step = op.step,
              .scratch = op.scratch,
              .pass = 0};
  const auto matrices = static_cast<unsigned>(op.table->count());
  const dim3 block(kThreads);
  int row_blocks = (n + kRows - 1) / kRows;
  for (; a.pass < kPasses; ++a.pass) {
    launch("orthonormalize, Gram matrices", gram_kernel,
           {.grid = dim3(static_cast<unsigned>(lower_tiles(tiles_of(rank))), matrices),
            .block = block,
            .shared_bytes = sizeof(float) * kGramStages * 2 * kSide,
            .stream = stream},
           a);
    launch("orthonormalize, factors", factor_kernel,
           {.grid = dim3(matrices),
            .block = block,
            .shared_bytes = 2 * sizeof(double) * kSquareTile * kStride,
            .stream = stream},
           a);
    launch("orthonormalize, rows", rows_kernel,
           {.grid = dim3(static_cast<unsigned>(row_blocks), matrices),
            .block = block,
            .shared_bytes = sizeof(float) * kRows * static_cast<size_t>(row_stride(rank)),
            .stream = stream},
           a);
    // Later passes often have nothing to do, and a block that ends at once takes a microsecond.
    row_blocks = std::min(row_blocks, 8 * multiprocessors() / op.table->count() + 1);
  }
}

}  // namespace gradwire::cuda
