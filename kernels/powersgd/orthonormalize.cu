// CholeskyQR on CUDA: all matrices of a table in one launch, a block per matrix.
//
// Bytes: 4 n r read twice and written once per pass, in one or two passes. For PowerSGD's sizes the L2 cache
// serves the reads. Limit: FP64 throughput and latency of one SM per matrix: a matrix costs n r^2 FP64
// multiply-adds for the Gram matrix and as many for the product with the inverse factor, both by tensor cores
// in tiles of 8 x 8: each element is then converted to FP64 once for 32 columns. The algorithm is that of
// kernels/powersgd/orthonormalize_host.cpp. All threads take each decision (a column is dependent, another
// pass is needed) from the same shared values. Deterministic: sums have a fixed order.
#include "kernels/powersgd/orthonormalize.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kThreads = 384;  // more would spill registers
constexpr int kWarps = kThreads / 32;
constexpr int kBlock = 32;  // columns whose sums a warp keeps, as kTiles tiles of 8
constexpr int kTiles = kBlock / 8;
constexpr int kRows = 16;  // rows of the result that a warp computes at once

// A block's shared memory: the arrays that large matrices have in global memory, whose `square` holds the
// weights, by tiles of 4 x 8 in the order of lanes; and two tiles of `size` rows, the rank rounded up to
// whole panels.
constexpr int kScratchDoubles = kMaxSmallRank * (kMaxSmallRank + 4);
struct Workspace {
  LargeScratch s;
  int size, stride;  // rows of `gram` are one more than columns apart, against bank conflicts
  double* factors;   // rows kStride apart
  double* gram;      // later the inverses of the factor's panels, rows kStride apart

  __device__ __forceinline__ Workspace(double* shared, int rank)
      : s(shared, rank),
        size((rank + kPanel - 1) / kPanel * kPanel),
        stride(size + 1),
        factors(shared + kScratchDoubles),
        gram(factors + size * kStride) {}
};

// Loads every eighth column of a row, from `column` on; columns beyond the rank are zero.
__device__ __forceinline__ void load_columns(const float* from, int column, int rank, bool there,
                                             float (&x)[kTiles]) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) x[t] = there && column + 8 * t < rank ? from[8 * t] : 0.0f;
}

// Computes columns [left, left + 32) x [right, right + 32) of w.gram = A^T A, and their mirror image. A warp
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
      double& total = w.gram[i * w.stride + j];
      total = (warp == 0 ? 0.0 : total) + sum[e / (2 * kTiles)][e / 2 % kTiles][e % 2];
      if (left != right) w.gram[j * w.stride + i] = total;
    }
  }
  __syncthreads();
}

// Computes weights, so that A * weights has orthonormal columns, from the Gram matrix; marks dependent
// columns. Returns the smallest pivot, or 0 if a column is dependent, to the first warp.
__device__ __forceinline__ double factor(const Workspace& w, int pass, int rank) {
  const int thread = static_cast<int>(threadIdx.x), size = w.size;
  const auto column = [&](int k) { return k < rank ? column_of(w.s, pass, k) : k; };
  if (thread < rank) {
    const double square = w.gram[column(thread) * (w.stride + 1)];
    w.s.scale[thread] = square > 0.0 ? 1.0 / square : 0.0;
  }
  for (int item = thread; item < size * size; item += kThreads) {
    const int i = item / size, j = item % size;
    const double padding = i == j ? 1.0 : 0.0;  // the identity
    w.factors[i * kStride + j] = i < rank && j < rank ? w.gram[column(i) * w.stride + column(j)] : padding;
  }
  __syncthreads();
  const double smallest =
      factor_panels<kWarps>(w.factors, w.gram, size / kPanel, rank, w.s.scale, w.s.dependent);
  for (int item = thread; item < size * size; item += kThreads) {
    const int i = item / size, j = item % size, k = column(i), c = column(j);
    w.s.square[(k / 4 * (kMaxSmallRank / 8) + c / 8) * 32 + c % 8 * 4 + k % 4] =
        i / kPanel <= j / kPanel ? w.factors[i * kStride + j] : 0.0;
  }
  __syncthreads();
  return smallest;
}

// Computes out = in * weights, with dependent columns drawn again. `out` may equal `in`: a warp has loaded
// its rows when it writes them.
__device__ __forceinline__ void apply(const OrthonormalizeArgs& a, const MatrixDescriptor& d,
                                      const TallMatrix& m, int pass, const LargeScratch& s) {
  constexpr int kMaxSteps = kMaxSmallRank / 4;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int rank = m.rank, across = (rank + 7) / 8;
  const int32_t n = m.n;
  const float* const in = m.in;
  float* const out = m.out;
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
          const double weight = s.square[(t * (kMaxSmallRank / 8) + tile0 + i) * 32 + lane];
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
  const uint64_t step = a.op.step != nullptr ? *a.op.step : 0;
  for (int k = 0; k < rank; ++k) {
    const int column = column_of(s, pass, k), draws = s.dependent[k];
    if (draws == 0) continue;
    for (int32_t row = static_cast<int>(threadIdx.x); row < n; row += kThreads) {
      out[static_cast<int64_t>(row) * rank + column] =
          reseed_value(a.op.seed, step, d.seed_id, static_cast<int>(a.op.which), column, draws - 1, row);
    }
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads)
    orthonormalize_kernel(const __grid_constant__ OrthonormalizeArgs a) {
  wait_for_earlier_kernels();
  GW_DYNAMIC_SHARED(double, shared);
  __shared__ int infinite[1];  // later: whether a column was drawn
  __shared__ double smallest[1];
  const int matrix = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  if (a.op.keep_flags && a.op.flags[matrix] != 0) return;
  const MatrixDescriptor d = a.matrices.descriptors[matrix];
  if (d.rank > kMaxSmallRank) return;
  const Workspace w(shared, d.rank);
  TallMatrix m = matrix_of(a, d);
  if (thread == 0) infinite[0] = 0;
  for (int pass = 0; pass < kMaxOrthonormalizePasses; ++pass) {
#pragma unroll 1
    for (int left = 0; left < m.rank; left += kBlock) {
#pragma unroll 1
      for (int right = 0; right <= left; right += kBlock) gram_block(m.in, m.n, m.rank, left, right, w);
    }
    if (pass == 0) {
      // Squares of floats are finite in double, and so is their sum, unless there is a NaN or an Inf.
      if (thread < m.rank && !(w.gram[thread * (w.stride + 1)] < 1e300)) infinite[0] = 1;
      __syncthreads();
      if (thread == 0 && (infinite[0] != 0 || !a.op.keep_flags)) a.op.flags[matrix] = infinite[0];
      if (infinite[0] != 0) return;
    }
    const double pivot = factor(w, pass, m.rank);
    if (thread == 0) smallest[0] = pivot;
    count_draws(w.s, pass, m.rank, infinite);
    apply(a, d, m, pass, w.s);
    if (smallest[0] >= kFinalPivot) return;
    m.in = m.out;
  }
}

}  // namespace

void orthonormalize(CudaStream stream, const Orthonormalize& op) {
  const int rank = std::min(op.table->max_rank(), kMaxSmallRank),
            size = (rank + kPanel - 1) / kPanel * kPanel;
  launch("orthonormalize", orthonormalize_kernel,
         {.grid = dim3(static_cast<unsigned>(op.table->count())),
          .block = dim3(kThreads),
          .shared_bytes = sizeof(double) * static_cast<size_t>(kScratchDoubles + 2 * size * kStride),
          .stream = stream},
         OrthonormalizeArgs{.matrices = matrices_of(*op.table), .op = op});
  orthonormalize_large(stream, op);
}

// Normalizes 32 columns of a matrix per block; eight groups of threads sum rows at a fixed stride.

namespace {

constexpr int kColumns = 32;
constexpr int kGroups = 8;

__global__ void __launch_bounds__(kColumns* kGroups)
    normalize_columns_kernel(const MatrixDescriptor* matrices, float* q_array, float* basis_array,
                             const int32_t* flags, bool orthonormal) {
  wait_for_earlier_kernels();
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
