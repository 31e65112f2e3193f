// CholeskyQR on CUDA above rank kMaxSmallRank. A pass is three launches: tiles of the Gram matrices, a
// factor per block, and 32 rows of the result per block. The host cannot know how many passes the columns
// need, so it launches the most that can be needed; blocks of finished matrices end at once.
//
// Limit: FP64 arithmetic, n r^2 multiply-adds per matrix for the Gram matrix and the rows together, and 2/3
// r^3 for the factor, on one SM. The algorithm is that of large_orthonormalize_host.cpp. Sums have a fixed
// order.
#include "kernels/powersgd/orthonormalize.h"

#include <algorithm>

#include "kernels/powersgd/powersgd.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kGramRows = 32;
constexpr int kRows = 32;                 // rows of the result per block
constexpr int kStride = kSquareTile + 2;  // of staged tiles: against bank conflicts, and 16-byte aligned
constexpr int kTileElements = kSquareTile * kSquareTile;
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

// A thread's 4 x 4 elements of a tile.
struct Part {
  int row, column;
};
__device__ __forceinline__ Part part_of_thread() {
  const int thread = static_cast<int>(threadIdx.x);
  return {thread / 16 * 4, thread % 16 * 4};
}

// Adds `count` products of columns of the staged tiles left[k][row] and right[k][column] to acc.
__device__ __forceinline__ void add_products(const double* left, const double* right, const Part& part,
                                             int count, double (&acc)[4][4]) {
  for (int k = 0; k < count; ++k) {
    double x[4], y[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      x[c] = left[k * kStride + part.row + c];
      y[c] = right[k * kStride + part.column + c];
    }
#pragma unroll
    for (int e = 0; e < 16; ++e) acc[e / 4][e % 4] = fma(x[e / 4], y[e % 4], acc[e / 4][e % 4]);
  }
}

// Stages rows of A as doubles: to[row][c] = A[row0 + row][order[first + c]]; 0 outside A.
__device__ __forceinline__ void stage_columns(const LargeArgs& a, const LargeMatrix& m, const LargeScratch& s,
                                              int32_t row0, int first, double* to) {
  for (int item = static_cast<int>(threadIdx.x); item < kGramRows * kSquareTile; item += kThreads) {
    const int row = item / kSquareTile, c = item % kSquareTile;
    const bool there = row0 + row < m.n && first + c < m.rank;
    to[row * kStride + c] =
        there ? m.in[static_cast<int64_t>(row0 + row) * m.rank + column_of(a, s, first + c)] : 0.0f;
  }
}

__global__ void __launch_bounds__(kThreads) gram_kernel(const __grid_constant__ LargeArgs a) {
  __shared__ double left[kGramRows * kStride], right[kGramRows * kStride];
  const int matrix = static_cast<int>(blockIdx.y);
  const MatrixDescriptor d = a.matrices.descriptors[matrix];
  if (d.rank <= kMaxSmallRank || static_cast<int>(blockIdx.x) >= lower_tiles(tiles_of(d.rank))) return;
  const LargeScratch s(a.scratch + d.scratch, d.rank);
  if (a.pass > 0 ? *s.state != LargeState::active : a.keep_flags && a.flags[matrix] != 0) return;
  const LargeMatrix m = matrix_of(a, d);
  const Part part = part_of_thread();
  int row = 0, column = 0;
  split_lower(static_cast<int>(blockIdx.x), row, column);
  double acc[4][4] = {};
  for (int32_t row0 = 0; row0 < m.n; row0 += kGramRows) {
    __syncthreads();
    stage_columns(a, m, s, row0, row * kSquareTile, left);
    stage_columns(a, m, s, row0, column * kSquareTile, right);
    __syncthreads();
    add_products(left, right, part, kGramRows, acc);
  }
  double* const out = s.tile(row, column) + static_cast<int64_t>(part.row) * s.size + part.column;
#pragma unroll
  for (int e = 0; e < 16; ++e) out[e / 4 * s.size + e % 4] = acc[e / 4][e % 4];
}

// Stage a tile of the square as to[row][column], or transposed.
__device__ __forceinline__ void stage(const double* tile, int64_t stride, double* to) {
  for (int item = static_cast<int>(threadIdx.x); item < kTileElements; item += kThreads) {
    const int row = item / kSquareTile, column = item % kSquareTile;
    to[row * kStride + column] = tile[row * stride + column];
  }
}
__device__ __forceinline__ void stage_transposed(const double* tile, int64_t stride, double* to) {
  for (int item = static_cast<int>(threadIdx.x); item < kTileElements; item += kThreads) {
    const int row = item / kSquareTile, column = item % kSquareTile;
    to[column * kStride + row] = tile[row * stride + column];
  }
}

// Scales the columns of A in its Gram matrix to norm 1, and pads the matrix with the identity.
__device__ __forceinline__ void scale_gram(const LargeScratch& s, int rank) {
  for (int k = static_cast<int>(threadIdx.x); k < s.size; k += kThreads) {
    const double square = s.square[static_cast<int64_t>(k) * s.size + k];
    s.scale[k] = k < rank && square > 0.0 ? 1.0 / sqrt(square) : 0.0;
  }
  __syncthreads();
  for (int i = 0; i < s.size; ++i) {
    double* const row = s.square + static_cast<int64_t>(i) * s.size;
    for (int j = static_cast<int>(threadIdx.x); j <= i; j += kThreads) {
      row[j] = i == j && i >= rank ? 1.0 : row[j] * (s.scale[i] * s.scale[j]);
    }
  }
  __syncthreads();
}

// Factors the staged tile `l`: A = L L^T, with 1 in place of the pivots of dependent columns. Sets `inverse`
// to L^-1, with zeros above the diagonal. Returns to all threads the smallest pivot, or 0 if a column is
// dependent.
__device__ __forceinline__ double factor_tile(double* l, double* inverse, int32_t* dependent) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int item = thread; item < kTileElements; item += kThreads) {
    const int i = item / kSquareTile, j = item % kSquareTile;
    inverse[i * kStride + j] = i == j ? 1.0 : 0.0;
  }
  __syncthreads();
  double smallest = 1.0;
  for (int j = 0; j < kSquareTile; ++j) {
    const double pivot = l[j * kStride + j];
    const bool depends = !(pivot > kDependentPivot);
    const double inverse_root = depends ? 1.0 : 1.0 / sqrt(pivot);
    smallest = depends ? 0.0 : fmin(smallest, pivot);
    __syncthreads();
    if (thread == 0) dependent[j] = depends ? 1 : 0;
    if (thread < kSquareTile && thread > j) {
      l[thread * kStride + j] = depends ? 0.0 : l[thread * kStride + j] * inverse_root;
    } else if (thread <= j) {
      inverse[j * kStride + thread] *= inverse_root;
    }
    __syncthreads();
    const int column = thread % kSquareTile;
    for (int i = j + 1 + thread / kSquareTile; i < kSquareTile; i += kThreads / kSquareTile) {
      const double l_i = l[i * kStride + j];
      if (column <= j) {
        inverse[i * kStride + column] -= l_i * inverse[j * kStride + column];
      } else if (column <= i) {
        l[i * kStride + column] -= l_i * l[column * kStride + j];
      }
    }
    __syncthreads();
  }
  return smallest;
}

// The shared memory of the factor's block.
struct Staged {
  double *left, *right;  // tiles, rows kStride apart
  int32_t* dependent;    // (kSquareTile)
};

// Sets a tile on the diagonal to L_jj^-T, and writes the tiles of L below it. Subtracts their products from
// the matrix.
__device__ __forceinline__ double eliminate(const LargeScratch& s, int j, const Staged& staged) {
  const int thread = static_cast<int>(threadIdx.x), tiles = s.size / kSquareTile;
  const Part part = part_of_thread();
  stage(s.tile(j, j), s.size, staged.left);
  __syncthreads();
  const double smallest = factor_tile(staged.left, staged.right, staged.dependent);
  for (int item = thread; item < kTileElements; item += kThreads) {
    const int row = item / kSquareTile, column = item % kSquareTile;
    s.tile(j, j)[static_cast<int64_t>(row) * s.size + column] = staged.right[column * kStride + row];
  }
  if (thread < kSquareTile) s.dependent[j * kSquareTile + thread] = staged.dependent[thread];
  for (int i = j + 1; i < tiles; ++i) {
    __syncthreads();
    stage_transposed(s.tile(i, j), s.size, staged.left);
    stage(s.tile(j, j), s.size, staged.right);
    __syncthreads();
    double acc[4][4] = {};
    add_products(staged.left, staged.right, part, kSquareTile, acc);
    double* const out = s.tile(i, j) + static_cast<int64_t>(part.row) * s.size + part.column;
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      const bool zero = staged.dependent[part.column + e % 4] != 0;
      out[e / 4 * s.size + e % 4] = zero ? 0.0 : acc[e / 4][e % 4];
    }
  }
  for (int k = j + 1; k < tiles; ++k) {
    for (int i = k; i < tiles; ++i) {
      __syncthreads();
      stage_transposed(s.tile(i, j), s.size, staged.left);
      stage_transposed(s.tile(k, j), s.size, staged.right);
      __syncthreads();
      double acc[4][4] = {};
      add_products(staged.left, staged.right, part, kSquareTile, acc);
      double* const out = s.tile(i, k) + static_cast<int64_t>(part.row) * s.size + part.column;
#pragma unroll
      for (int e = 0; e < 16; ++e) out[e / 4 * s.size + e % 4] -= acc[e / 4][e % 4];
    }
  }
  __syncthreads();
  return smallest;
}

// Computes the tiles of L^-T above tile `j` on the diagonal, which holds L_jj^-T.
__device__ __forceinline__ void invert_above(const LargeScratch& s, int j, const Staged& staged) {
  const Part part = part_of_thread();
  for (int k = 0; k < j; ++k) {
    double acc[4][4] = {};
    for (int m = k; m < j; ++m) {
      __syncthreads();
      stage_transposed(s.tile(k, m), s.size, staged.left);
      stage_transposed(s.tile(j, m), s.size, staged.right);
      __syncthreads();
      add_products(staged.left, staged.right, part, kSquareTile, acc);
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      staged.left[(part.column + e % 4) * kStride + part.row + e / 4] = acc[e / 4][e % 4];
      acc[e / 4][e % 4] = 0.0;
    }
    stage(s.tile(j, j), s.size, staged.right);
    __syncthreads();
    add_products(staged.left, staged.right, part, kSquareTile, acc);
    double* const out = s.tile(k, j) + static_cast<int64_t>(part.row) * s.size + part.column;
#pragma unroll
    for (int e = 0; e < 16; ++e) out[e / 4 * s.size + e % 4] = -acc[e / 4][e % 4];
  }
  __syncthreads();
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
  __shared__ int32_t dependent[kSquareTile];
  __shared__ int infinite[1];  // later: whether a column was drawn
  const int matrix = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const MatrixDescriptor d = a.matrices.descriptors[matrix];
  if (d.rank <= kMaxSmallRank) return;
  const LargeScratch s(a.scratch + d.scratch, d.rank);
  const bool done = a.pass > 0 ? *s.state != LargeState::active : a.keep_flags && a.flags[matrix] != 0;
  if (thread == 0) infinite[0] = 0;
  __syncthreads();
  for (int k = thread; a.pass == 0 && !done && k < d.rank; k += kThreads) {
    // Squares of floats are finite in double, and so is their sum, unless there is a NaN or an Inf.
    if (!(s.square[static_cast<int64_t>(k) * s.size + k] < 1e300)) infinite[0] = 1;
  }
  __syncthreads();
  if (done || infinite[0] != 0) {
    if (thread == 0) *s.state = LargeState::done;
    if (thread == 0 && !done) a.flags[matrix] = 1;
    return;
  }
  if (thread == 0 && a.pass == 0 && !a.keep_flags) a.flags[matrix] = 0;
  const Staged staged{shared, shared + kSquareTile * kStride, dependent};
  scale_gram(s, d.rank);
  double smallest = 1.0;
  for (int j = 0; j < s.size / kSquareTile; ++j) {
    smallest = fmin(smallest, eliminate(s, j, staged));
    invert_above(s, j, staged);
  }
  for (int k = 0; k < d.rank; ++k) {
    double* const row = s.square + static_cast<int64_t>(k) * s.size;
    for (int c = k + thread; c < d.rank; c += kThreads) row[c] = exact_weight(row[c] * s.scale[k]);
  }
  count_draws(a, s, d.rank, infinite);
  if (thread == 0) {
    *s.state = smallest >= kFinalPivotOfRoundedWeights ? LargeState::last_rows : LargeState::active;
  }
}

// Computes 4 x 4 elements of in * weights from the staged rows of `in`; draws dependent columns.
__device__ __forceinline__ void weigh(const LargeArgs& a, const MatrixDescriptor& d, const LargeMatrix& m,
                                      const LargeScratch& s, const float* rows, int32_t row0, int row,
                                      int column) {
  double acc[4][4] = {};
  const int end = min(column + 4, m.rank);
  for (int k = 0; k < end; ++k) {
    const double* const weights = s.square + static_cast<int64_t>(k) * s.size + column;
    double w[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) w[c] = weights[c];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const double x = rows[(row + i) * m.rank + k];
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[i][c] = fma(x, w[c], acc[i][c]);
    }
  }
  const uint64_t step = a.step != nullptr ? *a.step : 0;
#pragma unroll
  for (int e = 0; e < 16; ++e) {
    const int32_t at = row0 + row + e / 4;
    const int k = column + e % 4;
    if (at >= m.n || k >= m.rank) continue;
    const int c = column_of(a, s, k), draws = s.dependent[k];
    const float value =
        draws == 0 ? static_cast<float>(acc[e / 4][e % 4])
                   : reseed_value(a.seed, step, d.seed_id, static_cast<int>(a.which), c, draws - 1, at);
    m.out[static_cast<int64_t>(at) * m.rank + c] = value;
  }
}

__global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ LargeArgs a) {
  GW_DYNAMIC_SHARED(float, rows);
  const MatrixDescriptor d = a.matrices.descriptors[blockIdx.y];
  const LargeMatrix m = matrix_of(a, d);
  const int32_t row0 = static_cast<int32_t>(blockIdx.x) * kRows;
  if (d.rank <= kMaxSmallRank || row0 >= m.n) return;
  const LargeScratch s(a.scratch + d.scratch, d.rank);
  if (*s.state == LargeState::done) return;
  for (int item = static_cast<int>(threadIdx.x); item < kRows * m.rank; item += kThreads) {
    const int row = item / m.rank, column = column_of(a, s, item % m.rank);
    rows[item] = row0 + row < m.n ? m.in[static_cast<int64_t>(row0 + row) * m.rank + column] : 0.0f;
  }
  __syncthreads();
  const int quads = (m.rank + 3) / 4;
  for (int item = static_cast<int>(threadIdx.x); item < quads * (kRows / 4); item += kThreads) {
    weigh(a, d, m, s, rows, row0, item / quads * 4, item % quads * 4);
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
  for (; a.pass < kPasses; ++a.pass) {
    launch("orthonormalize, Gram matrices", gram_kernel,
           {.grid = dim3(static_cast<unsigned>(lower_tiles(tiles_of(rank))), matrices),
            .block = block,
            .stream = stream},
           a);
    launch("orthonormalize, factors", factor_kernel,
           {.grid = dim3(matrices),
            .block = block,
            .shared_bytes = 2 * sizeof(double) * kSquareTile * kStride,
            .stream = stream},
           a);
    launch("orthonormalize, rows", rows_kernel,
           {.grid = dim3(static_cast<unsigned>((n + kRows - 1) / kRows), matrices),
            .block = block,
            .shared_bytes = sizeof(float) * kRows * static_cast<size_t>(rank),
            .stream = stream},
           a);
  }
}

}  // namespace gradwire::cuda
