// PowerSGD pass (c) on CUDA: grad = scale * P Q^T, and optionally residual += P q_lost^T or p_lost Q^T.
//
// Bytes per element: 4, or 12 with one of those. Limit: memory bandwidth up to about rank 32.
// A block writes a tile of 64 rows x 256 columns. Its parts of P and of Q (transposed) lie in shared memory;
// a thread computes 8 rows x 4 columns at a time, so that a value read from shared memory serves 4 to 8
// multiply-adds. Alignment: any; 16-byte accesses when a matrix's rows are 16-byte aligned. Deterministic:
// each element is one thread's sum over the rank, in order.
#include "kernels/powersgd/powersgd.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kQuads = kTileCols / 4;       // threads that share a row
constexpr int kGroups = kThreads / kQuads;  // of rows, interleaved
constexpr int kRows = 8;                    // per thread and pass
constexpr int kPassRows = kRows * kGroups;
constexpr int kQStride = kTileCols + 4;

struct ReconstructArgs {
  Matrices matrices;
  const float *p, *q, *p_lost, *q_lost;
  float *grad, *residual;
  bool restore;
  float scale;
  const int32_t* flags;
  int padded_rank;  // the largest rank of the table, rounded up to 4: sizes the shared arrays
};

struct Tile {
  int row0, rows, column0, columns;
};

// shared[k][column] = Q[column0 + column][k], zero where there is none. The tile's part of Q is contiguous.
__device__ __forceinline__ void stage_q(const float* q, const MatrixDescriptor& d, const Tile& tile,
                                        int padded, float* shared) {
  const float* from = q + d.q_offset + static_cast<int64_t>(tile.column0) * d.rank;
  for (int item = static_cast<int>(threadIdx.x); item < tile.columns * d.rank; item += kThreads) {
    shared[item % d.rank * kQStride + item / d.rank] = from[item];
  }
  for (int k = 0; k < padded; ++k) {
    int column = static_cast<int>(threadIdx.x);
    if (k >= d.rank || column >= tile.columns) shared[k * kQStride + column] = 0.0f;
  }
}

// shared[row][k] = P[row0 + row][k], zero where there is none.
__device__ __forceinline__ void stage_p(const float* p, const MatrixDescriptor& d, const Tile& tile,
                                        int padded, float* shared) {
  const float* from = p + d.p_offset + static_cast<int64_t>(tile.row0) * d.rank;
  for (int item = static_cast<int>(threadIdx.x); item < kTileRows * padded; item += kThreads) {
    int row = item / padded, k = item % padded;
    shared[item] = row < tile.rows && k < d.rank ? from[row * d.rank + k] : 0.0f;
  }
}

// sum[i] = row (first_row + i * kGroups) of the tile's product, at this thread's four columns.
template <bool kVector>
__device__ __forceinline__ void product(const float* shared_p, const float* shared_q,
                                        const Quad<kVector>& quad, int first_row, int padded,
                                        float (&sum)[kRows][4]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0.0f;
  for (int k0 = 0; k0 < padded; k0 += 4) {
    float q[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) quad.load(shared_q + (k0 + k) * kQStride, kTileCols, q[k]);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float4 p = *reinterpret_cast<const float4*>(shared_p + (first_row + i * kGroups) * padded + k0);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sum[i][c] = fmaf(p.x, q[0][c], sum[i][c]);
        sum[i][c] = fmaf(p.y, q[1][c], sum[i][c]);
        sum[i][c] = fmaf(p.z, q[2][c], sum[i][c]);
        sum[i][c] = fmaf(p.w, q[3][c], sum[i][c]);
      }
    }
  }
}

// The residual M of a matrix that was not finite becomes the previous step's.
__device__ __forceinline__ void restore(const ReconstructArgs& a, const MatrixDescriptor& d,
                                        const Tile& tile) {
  const int column = tile.column0 + static_cast<int>(threadIdx.x);
  for (int row = tile.row0; column < tile.column0 + tile.columns && row < tile.row0 + tile.rows; ++row) {
    const int64_t at = d.offset + static_cast<int64_t>(row) * d.cols + column;
    if (!is_finite(a.grad[at])) continue;  // holds the old residual already
    const float old = a.residual[at] - a.grad[at];
    a.residual[at] = is_finite(old) ? old : 0.0f;
  }
}

template <bool kVector>
__device__ __forceinline__ void reconstruct_tile(const ReconstructArgs& a, const MatrixDescriptor& d,
                                                 const Tile& tile, bool flagged, float* shared) {
  Quad<kVector> quad{kQuads, static_cast<int>(threadIdx.x) % kQuads};
  int group = static_cast<int>(threadIdx.x) / kQuads;
  float* shared_q = shared;
  float* shared_p = shared + a.padded_rank * kQStride;
  int padded = (d.rank + 3) / 4 * 4;
  int64_t origin = d.offset + static_cast<int64_t>(tile.row0) * d.cols + tile.column0;

  if (flagged && a.restore) restore(a, d, tile);
  stage_p(a.p, d, tile, padded, shared_p);
  stage_q(a.q, d, tile, padded, shared_q);
  __syncthreads();
  for (int row0 = group; row0 < tile.rows; row0 += kPassRows) {
    float sum[kRows][4];
    product<kVector>(shared_p, shared_q, quad, row0, padded, sum);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      int row = row0 + i * kGroups;
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[i][c] = flagged ? bits_float(0x7fc00000u) : a.scale * sum[i][c];
      quad.store(a.grad + origin + static_cast<int64_t>(row) * d.cols, row < tile.rows ? tile.columns : 0,
                 sum[i]);
    }
  }
  if ((a.p_lost == nullptr && a.q_lost == nullptr) || flagged) return;

  __syncthreads();
  if (a.p_lost != nullptr) stage_p(a.p_lost, d, tile, padded, shared_p);
  if (a.q_lost != nullptr) stage_q(a.q_lost, d, tile, padded, shared_q);
  __syncthreads();
  for (int row0 = group; row0 < tile.rows; row0 += kPassRows) {
    float sum[kRows][4];
    product<kVector>(shared_p, shared_q, quad, row0, padded, sum);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      int row = row0 + i * kGroups, limit = row < tile.rows ? tile.columns : 0;
      float* at = a.residual + origin + static_cast<int64_t>(row) * d.cols;
      float e[4];
      quad.load(at, limit, e);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float more = e[c] + sum[i][c];
        if (is_finite(more)) e[c] = more;
      }
      quad.store(at, limit, e);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 2) reconstruct_kernel(const __grid_constant__ ReconstructArgs a) {
  GW_DYNAMIC_SHARED(float, shared);
  int block = static_cast<int>(blockIdx.x);
  __shared__ int found[1];
  int matrix = find_matrix(a.matrices, &MatrixBlocks::tile, block, found);
  const MatrixDescriptor d = a.matrices.descriptors[matrix];
  int across = (d.cols + kTileCols - 1) / kTileCols, index = block - a.matrices.starts[matrix].tile;
  Tile tile{
      .row0 = index / across * kTileRows, .rows = 0, .column0 = index % across * kTileCols, .columns = 0};
  tile.rows = min(kTileRows, d.rows - tile.row0);
  tile.columns = min(kTileCols, d.cols - tile.column0);
  bool flagged = a.flags != nullptr && a.flags[matrix] != 0;
  bool vector = d.cols % 4 == 0 && aligned16(a.grad + d.offset) &&
                (a.residual == nullptr || aligned16(a.residual + d.offset));
  if (vector) {
    reconstruct_tile<true>(a, d, tile, flagged, shared);
  } else {
    reconstruct_tile<false>(a, d, tile, flagged, shared);
  }
}

}  // namespace

void powersgd_reconstruct(CudaStream stream, const PowerSgdReconstruct& op) {
  ReconstructArgs a{.matrices = matrices_of(*op.table),
                    .p = op.p,
                    .q = op.q,
                    .p_lost = op.p_lost,
                    .q_lost = op.q_lost,
                    .grad = op.grad,
                    .residual = op.residual,
                    .restore = op.restore && op.residual != nullptr,
                    .scale = op.scale,
                    .flags = op.flags,
                    .padded_rank = (op.table->max_rank() + 3) / 4 * 4};
  size_t shared_floats = static_cast<size_t>(a.padded_rank) * (kQStride + kTileRows);
  launch("powersgd_reconstruct", reconstruct_kernel,
         {.grid = dim3(static_cast<unsigned>(op.table->total_blocks().tile)),
          .block = dim3(kThreads),
          .shared_bytes = shared_floats * sizeof(float),
          .stream = stream},
         a);
}

}  // namespace gradwire::cuda
