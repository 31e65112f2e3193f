// CholeskyQR on CUDA: all matrices of a table in one launch, a block per matrix.
//
// Bytes: 4 n r read twice and written once per pass, in one or two passes. For PowerSGD's sizes the L2 cache
// serves the reads. Limit: FP64 throughput and latency of one SM per matrix: a matrix costs n r^2 FP64
// multiply-adds for the Gram matrix (half of them, in 4 x 4 register tiles) and as many for the product with
// the inverse factor. The algorithm is that of kernels/powersgd/orthonormalize_host.cpp. All threads take
// each decision (a column is dependent, another pass is needed) from the same shared values. Deterministic:
// sums have a fixed order.
#include "kernels/powersgd/orthonormalize.h"

#include "kernels/powersgd/powersgd.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kThreads = 512;
constexpr unsigned kAllLanes = 0xffffffffu;
// Elements of the rows staged for the product: a 4 x 4 tile per thread.
constexpr int kChunkFloats = 16 * kThreads;

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

// Shared memory of a block. Square arrays have rows of `stride` doubles: columns padded to a multiple of 4,
// plus one against bank conflicts.
struct Workspace {
  double *a, *b;  // (padded, stride) each
  float* chunk;   // (kChunkFloats); also the Gram matrix's partial sums
  int stride;
  int *order, *attempts, *dependent;  // (rank) elements each
  double* scale;                      // (rank) elements
};

__host__ __device__ constexpr int padded(int rank) {
  return (rank + 3) / 4 * 4;
}

// Loads four columns of a row; columns beyond the rank are zero.
__device__ __forceinline__ void load_quad(const float* row, int column, int rank, bool vector,
                                          double (&x)[4]) {
  if (vector) {
    float4 v = *reinterpret_cast<const float4*>(row + column);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) x[c] = column + c < rank ? row[column + c] : 0.0f;
  }
}

// Computes w.a = A^T A, both triangles, columns padded with zeros. A run of `splits` threads computes each 4
// x 4 tile of the lower triangle; each thread sums every splits-th row.
__device__ __forceinline__ void gram_matrix(const float* in, int32_t n, int rank, bool vector,
                                            const Workspace& w) {
  int quads = padded(rank) / 4, tiles = quads * (quads + 1) / 2;
  int splits = 1;
  while (2 * splits * tiles <= kThreads) splits *= 2;
  int thread = static_cast<int>(threadIdx.x), tile = thread / splits, split = thread % splits;
  int i = 0;  // tile = i (i + 1) / 2 + j
  while ((i + 1) * (i + 2) / 2 <= tile) ++i;
  int j = tile - i * (i + 1) / 2;
  bool mine = tile < tiles;

  double acc[4][4];
#pragma unroll
  for (int x = 0; x < 16; ++x) acc[x / 4][x % 4] = 0.0;
  for (int32_t row = split; mine && row < n; row += splits) {
    double left[4], right[4];
    const float* at = in + static_cast<int64_t>(row) * rank;
    load_quad(at, 4 * i, rank, vector, left);
    load_quad(at, 4 * j, rank, vector, right);
#pragma unroll
    for (int x = 0; x < 16; ++x) acc[x / 4][x % 4] = fma(left[x / 4], right[x % 4], acc[x / 4][x % 4]);
  }
  for (int offset = min(splits, 32) / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int x = 0; x < 16; ++x) acc[x / 4][x % 4] += __shfl_xor_sync(kAllLanes, acc[x / 4][x % 4], offset);
  }
  // After the reduction, one sum per warp remains.
  int warps = max(1, splits / 32);
  double* partial = reinterpret_cast<double*>(w.chunk);
  __syncthreads();
  if (warps > 1) {
    if (mine && split % 32 == 0) {
#pragma unroll
      for (int x = 0; x < 16; ++x) partial[(tile * warps + split / 32) * 16 + x] = acc[x / 4][x % 4];
    }
    __syncthreads();
    if (mine && split == 0) {
#pragma unroll
      for (int x = 0; x < 16; ++x) {
        double sum = 0.0;
        for (int part = 0; part < warps; ++part) sum += partial[(tile * warps + part) * 16 + x];
        acc[x / 4][x % 4] = sum;
      }
    }
  }
  if (mine && split == 0) {
#pragma unroll
    for (int x = 0; x < 16; ++x) {
      w.a[(4 * i + x / 4) * w.stride + 4 * j + x % 4] = acc[x / 4][x % 4];
      w.a[(4 * j + x % 4) * w.stride + 4 * i + x / 4] = acc[x / 4][x % 4];
    }
  }
  __syncthreads();
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

  // Restores the columns' original order, transposed, scaled, padded: weights[k][c] takes column k into c.
  for (int item = thread; item < padded(rank) * padded(rank); item += kThreads) {
    w.b[item / padded(rank) * w.stride + item % padded(rank)] = 0.0;
  }
  __syncthreads();
  for (int item = thread; item < rank * rank; item += kThreads) {
    int i = item / rank, j = item % rank;
    if (j <= i) w.b[w.order[j] * w.stride + w.order[i]] = w.a[i * w.stride + j] * w.scale[w.order[j]];
  }
  __syncthreads();
  return smallest;
}

// Computes out = in * weights (w.b), with dependent columns drawn again. `out` may equal `in`, because rows
// pass through shared memory.
__device__ __forceinline__ void apply(const OrthonormalizeArgs& a, const MatrixDescriptor& d, const float* in,
                                      float* out, int32_t n, bool vector, const Workspace& w) {
  int rank = d.rank, quads = padded(rank) / 4, row_tiles = kThreads / quads;
  int thread = static_cast<int>(threadIdx.x), tile = thread / quads, column0 = thread % quads * 4;
  uint64_t step = a.step != nullptr ? *a.step : 0;
  for (int32_t row0 = 0; row0 < n; row0 += 4 * row_tiles) {
    int rows = min(4 * row_tiles, n - row0);
    const float* from = in + static_cast<int64_t>(row0) * rank;
    for (int item = thread; item < rows * rank; item += kThreads) w.chunk[item] = from[item];
    __syncthreads();
    if (tile < row_tiles) {
      double y[4][4];
#pragma unroll
      for (int x = 0; x < 16; ++x) y[x / 4][x % 4] = 0.0;
      for (int k = 0; k < rank; ++k) {
        double weights[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) weights[c] = w.b[k * w.stride + column0 + c];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int row = tile + i * row_tiles;
          double x = row < rows ? w.chunk[row * rank + k] : 0.0f;
#pragma unroll
          for (int c = 0; c < 4; ++c) y[i][c] = fma(x, weights[c], y[i][c]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int row = tile + i * row_tiles;
        if (row >= rows) continue;
        float result[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          int column = column0 + c;
          result[c] = static_cast<float>(y[i][c]);
          if (column < rank && w.dependent[column] != 0) {
            result[c] = reseed_value(a.seed, step, d.seed_id, static_cast<int>(a.which), column,
                                     w.attempts[column], row0 + row);
          }
        }
        float* to = out + static_cast<int64_t>(row0 + row) * rank + column0;
        if (vector) {
          *reinterpret_cast<float4*>(to) = make_float4(result[0], result[1], result[2], result[3]);
        } else {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            if (column0 + c < rank) to[c] = result[c];
          }
        }
      }
    }
    __syncthreads();
  }
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
  bool vector = d.rank % 4 == 0 && aligned16(in) && aligned16(out);

  Workspace w;
  w.stride = padded(d.rank) + 1;
  w.a = shared;
  w.b = w.a + padded(d.rank) * w.stride;
  w.chunk = reinterpret_cast<float*>(w.b + padded(d.rank) * w.stride);
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
    gram_matrix(in, n, d.rank, vector, w);
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
    apply(a, d, in, out, n, vector, w);
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
  int size = padded(std::min(op.table->max_rank(), kMaxSmallRank));
  size_t bytes = 2 * sizeof(double) * static_cast<size_t>(size * (size + 1)) + sizeof(float) * kChunkFloats;
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
