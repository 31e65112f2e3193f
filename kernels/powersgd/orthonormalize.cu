// CholeskyQR on CUDA: all matrices of a table in one launch, a block per matrix.
//
// Bytes: 4 n r read twice and written once per pass, in one or two passes. For PowerSGD's sizes the L2 cache
// serves the reads. Limit: FP64 throughput and latency of one SM per matrix: a matrix costs n r^2 FP64
// multiply-adds for the Gram matrix and as many for the product with the inverse factor, both by tensor cores
// in tiles of 8 x 8: each element is then converted to FP64 once for 32 columns. The algorithm is that of
// kernels/powersgd/orthonormalize_host.cpp. All threads take each decision (a column is dependent, another
// pass is needed) from the same shared values. Deterministic: sums have a fixed order.
#include "kernels/powersgd/orthonormalize.h"

#include "kernels/powersgd/powersgd.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kThreads = 384;  // more would spill registers
constexpr int kWarps = kThreads / 32;
constexpr int kBlock = 32;  // columns whose sums a warp keeps, as kTiles tiles of 8
constexpr int kTiles = kBlock / 8;
constexpr int kRows = 16;  // rows of the result that a warp computes at once

struct OrthonormalizeArgs {
  Matrices matrices;
  Factor which;
  const float* in;
  float* out;
  int32_t* flags;
  bool keep_flags;
  uint64_t seed;
  const uint64_t* step;
};

// Shared memory of a block. Square arrays have rows of `stride` doubles: one more than columns, against bank
// conflicts.
struct Workspace {
  double *a, *b;    // (rank, stride) each
  double* weights;  // by tiles of 4 x 8, in the order of lanes
  int stride;
  int *order, *attempts, *dependent;  // (rank) elements each
  double* scale;                      // (rank) elements
};

// Loads every eighth column of a row, from `column` on; columns beyond the rank are zero.
__device__ __forceinline__ void load_columns(const float* from, int column, int rank, bool there,
                                             float (&x)[kTiles]) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) x[t] = there && column + 8 * t < rank ? from[8 * t] : 0.0f;
}

// Computes columns [left, left + 32) x [right, right + 32) of w.a = A^T A, and their mirror image. A warp
// sums four rows of every 48; the warps' sums are added in order.
__device__ __forceinline__ void gram_block(const float* in, int32_t n, int rank, int left, int right,
                                           const Workspace& w) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  double sum[kTiles][kTiles][2] = {};
  float next_x[kTiles], next_y[kTiles];
  int32_t row = 4 * warp + lane % 4;
  const float* from = in + static_cast<int64_t>(row) * rank + lane / 4;
  load_columns(from + left, left + lane / 4, rank, row < n, next_x);
  load_columns(from + right, right + lane / 4, rank, row < n, next_y);
#pragma unroll 1
  while (row - lane % 4 < n) {
    double x[kTiles], y[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) x[t] = next_x[t], y[t] = next_y[t];
    row += 4 * kWarps;
    from += static_cast<int64_t>(4 * kWarps) * rank;
    load_columns(from + left, left + lane / 4, rank, row < n, next_x);
    load_columns(from + right, right + lane / 4, rank, row < n, next_y);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        if (left + 8 * i < rank && right + 8 * j < rank) multiply_add(sum[i][j], x[i], y[j]);
      }
    }
  }
  for (int turn = 0; turn < kWarps; ++turn) {
    __syncthreads();
    if (turn != warp) continue;
#pragma unroll
    for (int e = 0; e < 2 * kTiles * kTiles; ++e) {
      const int i = left + e / (2 * kTiles) * 8 + lane / 4;
      const int j = right + e / 2 % kTiles * 8 + lane % 4 * 2 + e % 2;
      if (i >= rank || j >= rank) continue;
      double& total = w.a[i * w.stride + j];
      total = (warp == 0 ? 0.0 : total) + sum[e / (2 * kTiles)][e / 2 % kTiles][e % 2];
      if (left != right) w.a[j * w.stride + i] = total;
    }
  }
  __syncthreads();
}

__device__ __forceinline__ void gram_matrix(const float* in, int32_t n, int rank, const Workspace& w) {
#pragma unroll 1
  for (int left = 0; left < rank; left += kBlock) {
#pragma unroll 1
    for (int right = 0; right <= left; right += kBlock) gram_block(in, n, rank, left, right, w);
  }
}

// Subtracts L[i][j] times row j from each row i below row j. Columns up to j belong to the inverse, later
// columns to the matrix.
__device__ __forceinline__ void eliminate(int rank, int j, const Workspace& w) {
  int rows = rank - j - 1;
  for (int item = static_cast<int>(threadIdx.x); item < rows * rank; item += kThreads) {
    int i = j + 1 + item / rank, c = item % rank;
    if (c > i) continue;
    double l = w.b[i * w.stride + j];
    if (c <= j) {
      w.a[i * w.stride + c] -= l * w.a[j * w.stride + c];
    } else {
      w.b[i * w.stride + c] -= l * w.b[c * w.stride + j];
    }
  }
  __syncthreads();
}

// Replaces the Gram matrix in w.a by weights, so that A * weights has orthonormal columns; marks dependent
// columns. Returns to all threads the smallest pivot, or 0 if a column is dependent.
__device__ __forceinline__ double factor(int rank, const Workspace& w) {
  int thread = static_cast<int>(threadIdx.x);
  if (thread < rank) {
    double square = w.a[thread * w.stride + thread];
    w.scale[thread] = square > 0.0 ? 1.0 / sqrt(square) : 0.0;
  }
  __syncthreads();
  // w.b: the scaled Gram matrix in elimination order, later the factor L. w.a: the identity, later 1/L.
  for (int item = thread; item < rank * rank; item += kThreads) {
    int i = item / rank, j = item % rank, ci = w.order[i], cj = w.order[j];
    w.b[i * w.stride + j] = w.a[ci * w.stride + cj] * w.scale[ci] * w.scale[cj];
  }
  __syncthreads();
  for (int item = thread; item < rank * rank; item += kThreads) {
    w.a[item / rank * w.stride + item % rank] = item / rank == item % rank ? 1.0 : 0.0;
  }
  __syncthreads();

  double smallest = 1.0;
  for (int j = 0; j < rank; ++j) {
    double pivot = w.b[j * w.stride + j];
    bool dependent = !(pivot > kDependentPivot);
    double inverse_root = dependent ? 1.0 : 1.0 / sqrt(pivot);
    smallest = dependent ? 0.0 : fmin(smallest, pivot);
    if (thread == 0) w.dependent[w.order[j]] = dependent ? 1 : 0;
    // Scale column j of L below the diagonal, and row j of the inverse up to the diagonal.
    if (thread > j && thread < rank) {
      double& entry = w.b[thread * w.stride + j];
      entry = dependent ? 0.0 : entry * inverse_root;
    } else if (thread <= j) {
      w.a[j * w.stride + thread] *= inverse_root;
    }
    __syncthreads();
    eliminate(rank, j, w);
  }

  // Restores the columns' original order, transposed, scaled: weight (k, c) takes column k into c.
  for (int item = thread; item < rank * rank; item += kThreads) {
    w.b[item / rank * w.stride + item % rank] = 0.0;
  }
  __syncthreads();
  for (int item = thread; item < rank * rank; item += kThreads) {
    int i = item / rank, j = item % rank;
    if (j <= i) w.b[w.order[j] * w.stride + w.order[i]] = w.a[i * w.stride + j] * w.scale[w.order[j]];
  }
  __syncthreads();
  const int across = (rank + 7) / 8;
  for (int item = thread; item < (rank + 3) / 4 * across * 32; item += kThreads) {
    const int k = item / 32 / across * 4 + item % 4, c = item / 32 % across * 8 + item % 32 / 4;
    w.weights[item] = k < rank && c < rank ? w.b[k * w.stride + c] : 0.0;
  }
  __syncthreads();
  return smallest;
}

// Computes out = in * weights, with dependent columns drawn again. `out` may equal `in`: a warp has loaded
// its rows when it writes them.
__device__ __forceinline__ void apply(const OrthonormalizeArgs& a, const MatrixDescriptor& d, const float* in,
                                      float* out, int32_t n, const Workspace& w) {
  constexpr int kMaxSteps = kMaxSmallRank / 4;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int rank = d.rank, across = (rank + 7) / 8;
#pragma unroll 1
  for (int32_t row0 = kRows * warp; row0 < n; row0 += kRows * kWarps) {
    float x[2][kMaxSteps];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = row0 + 8 * half + lane / 4;
      const float* const from = in + static_cast<int64_t>(row) * rank + lane % 4;
#pragma unroll
      for (int t = 0; t < kMaxSteps; ++t) {
        x[half][t] = row < n && 4 * t + lane % 4 < rank ? from[4 * t] : 0.0f;
      }
    }
    __syncwarp();
#pragma unroll 1
    for (int tile0 = 0; tile0 < across; tile0 += kTiles) {
      double y[2][kTiles][2] = {};
#pragma unroll
      for (int t = 0; t < kMaxSteps; ++t) {
        if (4 * t >= rank) continue;
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          if (tile0 + i >= across) continue;
          const double weight = w.weights[(t * across + tile0 + i) * 32 + lane];
          multiply_add(y[0][i], x[0][t], weight);
          multiply_add(y[1][i], x[1][t], weight);
        }
      }
#pragma unroll
      for (int e = 0; e < 4 * kTiles; ++e) {
        const int32_t row = row0 + e / (2 * kTiles) * 8 + lane / 4;
        const int column = (tile0 + e / 2 % kTiles) * 8 + lane % 4 * 2 + e % 2;
        if (row >= n || column >= rank) continue;
        out[static_cast<int64_t>(row) * rank + column] =
            static_cast<float>(y[e / (2 * kTiles)][e / 2 % kTiles][e % 2]);
      }
    }
  }
  __syncthreads();
  const uint64_t step = a.step != nullptr ? *a.step : 0;
  for (int column = 0; column < rank; ++column) {
    if (w.dependent[column] == 0) continue;
    for (int32_t row = static_cast<int>(threadIdx.x); row < n; row += kThreads) {
      out[static_cast<int64_t>(row) * rank + column] =
          reseed_value(a.seed, step, d.seed_id, static_cast<int>(a.which), column, w.attempts[column], row);
    }
  }
  __syncthreads();
}

// Moves columns that were ever re-seeded to the end of the elimination order; the order of the other columns
// is unchanged.
__device__ __forceinline__ void update_order(int rank, const Workspace& w) {
  if (threadIdx.x == 0) {
    int sorted[2] = {0, 0};
    for (int k = 0; k < rank; ++k) {
      w.attempts[k] += w.dependent[k];
      sorted[1] += w.attempts[k] == 0 ? 1 : 0;
    }
    // w.dependent is free until the next factor(); the loop builds the new order in it.
    for (int i = 0; i < rank; ++i) {
      int column = w.order[i];
      if (w.attempts[column] == 0) {
        w.dependent[sorted[0]++] = column;
      } else {
        w.dependent[sorted[1]++] = column;
      }
    }
    for (int i = 0; i < rank; ++i) w.order[i] = w.dependent[i];
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads)
    orthonormalize_kernel(const __grid_constant__ OrthonormalizeArgs a) {
  GW_DYNAMIC_SHARED(double, shared);
  __shared__ int order[kMaxSmallRank], attempts[kMaxSmallRank], dependent[kMaxSmallRank];
  __shared__ double scale[kMaxSmallRank];
  __shared__ int infinite[1];
  int matrix = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  if (a.keep_flags && a.flags[matrix] != 0) return;
  const MatrixDescriptor d = a.matrices.descriptors[matrix];
  if (d.rank > kMaxSmallRank) return;
  int64_t offset = a.which == Factor::p ? d.p_offset : d.q_offset;
  int32_t n = a.which == Factor::p ? d.rows : d.cols;
  const float* in = a.in + offset;
  float* out = a.out + offset;

  Workspace w;
  w.stride = d.rank + 1;
  w.a = shared;
  w.b = w.a + d.rank * w.stride;
  w.weights = w.b + d.rank * w.stride;
  w.order = order;
  w.attempts = attempts;
  w.dependent = dependent;
  w.scale = scale;
  if (thread < d.rank) {
    order[thread] = thread;
    attempts[thread] = 0;
  }
  if (thread == 0) infinite[0] = 0;
  for (int pass = 0; pass < kMaxOrthonormalizePasses; ++pass) {
    gram_matrix(in, n, d.rank, w);
    if (pass == 0) {
      // Squares of floats are finite in double, and so is their sum, unless there is a NaN or an Inf.
      if (thread < d.rank && !(w.a[thread * w.stride + thread] < 1e300)) infinite[0] = 1;
      __syncthreads();
      if (infinite[0] != 0) {
        if (thread == 0) a.flags[matrix] = 1;
        return;
      }
      if (thread == 0 && !a.keep_flags) a.flags[matrix] = 0;
    }
    double smallest = factor(d.rank, w);
    apply(a, d, in, out, n, w);
    if (smallest >= kFinalPivot) return;
    update_order(d.rank, w);
    in = out;
  }
}

}  // namespace

void orthonormalize(CudaStream stream, const Orthonormalize& op) {
  OrthonormalizeArgs a{.matrices = matrices_of(*op.table),
                       .which = op.which,
                       .in = op.in,
                       .out = op.out,
                       .flags = op.flags,
                       .keep_flags = op.keep_flags,
                       .seed = op.seed,
                       .step = op.step};
  const int size = std::min(op.table->max_rank(), kMaxSmallRank), padded = (size + 7) / 8 * 8;
  const size_t bytes = sizeof(double) * static_cast<size_t>(2 * size * (size + 1) + padded * padded);
  launch("orthonormalize", orthonormalize_kernel,
         {.grid = dim3(static_cast<unsigned>(op.table->count())),
          .block = dim3(kThreads),
          .shared_bytes = bytes,
          .stream = stream},
         a);
  orthonormalize_large(stream, op);
}

// Normalizes 32 columns of a matrix per block; eight groups of threads sum rows at a fixed stride.

namespace {

constexpr int kColumns = 32;
constexpr int kGroups = 8;

__global__ void __launch_bounds__(kColumns* kGroups)
    normalize_columns_kernel(const MatrixDescriptor* matrices, float* q_array, float* basis_array,
                             const int32_t* flags, bool orthonormal) {
  __shared__ double squares[kGroups * kColumns];
  if (flags[blockIdx.y] != 0) return;
  const MatrixDescriptor d = matrices[blockIdx.y];
  const int lane = static_cast<int>(threadIdx.x) % kColumns, group = static_cast<int>(threadIdx.x) / kColumns;
  const int k = static_cast<int>(blockIdx.x) * kColumns + lane;
  float *q = q_array + d.q_offset + k, *basis = basis_array + d.q_offset + k;
  double sum = 0.0;
  for (int64_t row = group; k < d.rank && row < d.cols; row += kGroups) {
    const double x = q[row * d.rank];
    sum = fma(x, x, sum);
  }
  squares[group * kColumns + lane] = sum;
  __syncthreads();
  sum = 0.0;
  for (int g = 0; g < kGroups; ++g) sum += squares[g * kColumns + lane];
  // Of R or, with `orthonormal`, of Q.
  const float scale = !orthonormal ? column_scale(sum) : sum > 0 ? 1.0f : 0.0f;
  const float shape = shape_scale(d.rows, d.cols);
  for (int64_t row = group; k < d.rank && row < d.cols; row += kGroups) {
    const float x = (orthonormal ? basis : q)[row * d.rank] * scale;
    if (!orthonormal) basis[row * d.rank] = x;
    q[row * d.rank] = shape * x;
  }
}

}  // namespace

void normalize_columns(CudaStream stream, const NormalizeColumns& a) {
  const auto blocks = static_cast<unsigned>((a.table->max_rank() + kColumns - 1) / kColumns);
  launch("normalize_columns", normalize_columns_kernel,
         {.grid = dim3(blocks, static_cast<unsigned>(a.table->count())),
          .block = dim3(kColumns * kGroups),
          .stream = stream},
         a.table->device(), a.q, a.basis, a.flags, a.orthonormal);
}

}  // namespace gradwire::cuda
