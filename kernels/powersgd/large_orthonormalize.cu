// CholeskyQR on CUDA above rank kMaxSmallRank. A pass is three launches: tiles of the Gram matrices, a
// factor per block, and 64 rows of the result per block. The host cannot know how many passes the columns
// need, so it launches the most that can be needed; blocks of finished matrices end at once.
//
// Limit: FP64 tensor cores, n r^2 multiply-adds per matrix for the Gram matrix and the rows together, and r^3
// for the factor on one SM, which also waits for r pivots, one after the other. The algorithm is that of
// large_orthonormalize_host.cpp. Sums have a fixed order.
#include "kernels/powersgd/orthonormalize.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kWarpSide = 32;  // rows and columns of a warp's sums, in the Gram matrix and the result
constexpr int kGramRows = 32, kGramStages = 3;
constexpr int kFloatStride = kSquareTile + 8;    // of staged columns of A: against bank conflicts
constexpr int kSide = kGramRows * kFloatStride;  // floats
constexpr int kRows = 64;                        // rows of the result per block
// One pass for well-conditioned columns, two up to a condition number of 1e8, two more after unlucky draws.
constexpr int kPasses = 6;

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
__device__ __forceinline__ void stage_columns(const TallMatrix& m, int column, bool there, int32_t row0,
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
__global__ void __launch_bounds__(kThreads, 2) gram_kernel(const __grid_constant__ OrthonormalizeArgs a) {
  wait_for_earlier_kernels();
  GW_DYNAMIC_SHARED(float, staged);  // [stage][side][row][column], later the second warp's sums
  const int matrix = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
  const MatrixDescriptor d = a.matrices.descriptors[matrix];
  if (d.rank <= kMaxSmallRank || static_cast<int>(blockIdx.x) >= lower_tiles(tiles_of(d.rank))) return;
  const LargeScratch s(a.op.scratch + d.scratch, d.rank);
  if (a.pass > 0 ? *s.state != LargeState::active : a.op.keep_flags && a.op.flags[matrix] != 0) return;
  const TallMatrix m = matrix_of(a, d);
  int tile_row = 0, tile_column = 0;
  split_lower(static_cast<int>(blockIdx.x), tile_row, tile_column);
  const bool diagonal = tile_row == tile_column;
  int first[2] = {tile_row * kSquareTile + thread % kSquareTile,
                  tile_column * kSquareTile + thread % kSquareTile};
  bool there[2] = {first[0] < m.rank, first[1] < m.rank};
  for (int side = 0; side < 2; ++side) first[side] = there[side] ? column_of(s, a.pass, first[side]) : 0;
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
  const int first = j * kSquareTile;
  const double smallest = factor_panels<kWarps>(staged, inverse, kSquareTile / kPanel, rank - first,
                                                s.scale + first, s.dependent + first);
  for (int item = thread; item < kSquareTile * kSquareTile; item += kThreads) {
    const int row = item / 512 * 8 + item % 32 / 4, column = item / 32 % 16 * 4 + item % 4;
    const double weight = row / kPanel <= column / kPanel ? staged[row * kStride + column] : 0.0;
    inverse[column * kStride + row] = tile[static_cast<int64_t>(row) * s.size + column] = weight;
  }
  __syncthreads();
  return smallest;
}

__global__ void __launch_bounds__(kThreads) factor_kernel(const __grid_constant__ OrthonormalizeArgs a) {
  wait_for_earlier_kernels();
  GW_DYNAMIC_SHARED(double, shared);
  __shared__ int infinite[1];  // later: whether a column was drawn
  const int matrix = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const MatrixDescriptor d = a.matrices.descriptors[matrix];
  if (d.rank <= kMaxSmallRank) return;
  const LargeScratch s(a.op.scratch + d.scratch, d.rank);
  const bool done = a.pass > 0 ? *s.state != LargeState::active : a.op.keep_flags && a.op.flags[matrix] != 0;
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
    if (thread == 0 && !done) a.op.flags[matrix] = 1;
    return;
  }
  if (thread == 0 && a.pass == 0 && !a.op.keep_flags) a.op.flags[matrix] = 0;
  double* const inverse = shared + kSquareTile * kStride;
  double smallest = 1.0;
  for (int j = 0; j < s.size / kSquareTile; ++j) {
    smallest = fmin(smallest, factor_tile(s, d.rank, j, shared, inverse));
    eliminate<kSquareTile, kWarps>(s.square, s.size, s.size / kSquareTile, j, inverse);
  }
  count_draws(s, a.pass, d.rank, infinite);
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
__device__ __forceinline__ void weigh(const OrthonormalizeArgs& a, const MatrixDescriptor& d,
                                      const TallMatrix& m, const LargeScratch& s, const float* rows,
                                      int32_t row0, int column) {
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
  const uint64_t step = a.op.step != nullptr ? *a.op.step : 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int k = column + e / 2 * 8 + lane % 4 * 2 + e % 2;
    if (k >= m.rank) continue;
    const int c = column_of(s, a.pass, k), draws = s.dependent[k];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t at = row0 + 8 * i + lane / 4;
      if (at >= m.n) continue;
      const float value = draws == 0 ? static_cast<float>(sum[i][e / 2][e % 2])
                                     : reseed_value(a.op.seed, step, d.seed_id, static_cast<int>(a.op.which),
                                                    c, draws - 1, at);
      m.out[static_cast<int64_t>(at) * m.rank + c] = value;
    }
  }
}

// Stages rows of A in the background, with columns in the order of elimination; 0 outside A.
__device__ __forceinline__ void stage_ordered_rows(const OrthonormalizeArgs& a, const TallMatrix& m,
                                                   const LargeScratch& s, int32_t row0, float* rows) {
  const int warp = static_cast<int>(threadIdx.x) / 32, stride = row_stride(m.rank);
  for (int k = static_cast<int>(threadIdx.x) % 32; k < stride; k += 32) {
    const float* const from = m.in + (k < m.rank ? column_of(s, a.pass, k) : 0);
    for (int row = warp; row < kRows; row += kWarps) {
      copy_async<4>(rows + row * stride + k, from + static_cast<int64_t>(row0 + row) * m.rank,
                    k < m.rank && row0 + row < m.n);
    }
  }
  end_copies();
}

__global__ void __launch_bounds__(kThreads, 2) rows_kernel(const __grid_constant__ OrthonormalizeArgs a) {
  wait_for_earlier_kernels();
  GW_DYNAMIC_SHARED(float, rows);
  const MatrixDescriptor d = a.matrices.descriptors[blockIdx.y];
  const TallMatrix m = matrix_of(a, d);
  const LargeScratch s(a.op.scratch + d.scratch, d.rank);
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
  OrthonormalizeArgs a{.matrices = matrices_of(*op.table), .op = op};
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
