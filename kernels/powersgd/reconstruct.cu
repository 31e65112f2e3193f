// PowerSGD pass (c) on CUDA: grad = scale * P Q^T; settle: residual += P Q^T; form: settle, then residual +=
// grad.
//
// Bytes per element: 4; settle 8; form 12. Limit: memory bandwidth up to about rank 32. A block writes a tile
// of 64 rows x 256 columns. Its parts of P and Q (transposed) are in shared memory. A thread computes 8 rows
// x 4 columns at a time (settle and form: 4 x 4), so that a value read from shared memory serves 4 to 8
// multiply-adds. Alignment: any; 16-byte accesses when a matrix's rows are 16-byte aligned. Deterministic:
// each element is one thread's sum over the rank, in order.
#include "kernels/powersgd/powersgd.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kQuads = kTileCols / 4;       // threads that share a row
constexpr int kGroups = kThreads / kQuads;  // groups of rows, interleaved
constexpr int kQStride = kTileCols + 4;
constexpr int kMaxStaged = 64;  // columns of P and Q in shared memory; higher ranks are staged in parts

enum class Mode : uint8_t { reconstruct, settle, form };

struct ReconstructArgs {
  Matrices matrices = {};
  const float *p, *q;           // form: null if nothing is pending
  float* out;                   // grad; settle: the residual
  float* residual = nullptr;    // reconstruct: restored where flagged, unless null
  const float* grad = nullptr;  // form only
  int32_t* marks = nullptr;     // form only: 1 where M is not finite
  float scale = 1.0f;
  const int32_t* flags;
  int32_t first_block = 0;  // first block of the table
  int staged = 0;           // columns of P and Q in shared memory: sizes the shared arrays
};

struct Tile {
  int row0, rows, column0, columns;
};

// Stages `width` columns of P and Q, from k0 on: shared_q[k][column] = Q[column0 + column][k0 + k] and
// shared_p[row][k] = P[row0 + row][k0 + k]. Elements outside the matrices are zero.
__device__ __forceinline__ void stage_factors(const ReconstructArgs& a, const MatrixDescriptor& d,
                                              const Tile& tile, int k0, int width, float* shared_p,
                                              float* shared_q) {
  const int count = min(width, d.rank - k0);
  const float* q = a.q + d.q_offset + static_cast<int64_t>(tile.column0) * d.rank + k0;
  for (int item = static_cast<int>(threadIdx.x); item < tile.columns * count; item += kThreads) {
    shared_q[item % count * kQStride + item / count] = q[item / count * d.rank + item % count];
  }
  for (int k = 0; k < width; ++k) {
    int column = static_cast<int>(threadIdx.x);
    if (k >= count || column >= tile.columns) shared_q[k * kQStride + column] = 0.0f;
  }
  const float* p = a.p + d.p_offset + static_cast<int64_t>(tile.row0) * d.rank + k0;
  for (int item = static_cast<int>(threadIdx.x); item < kTileRows * width; item += kThreads) {
    int row = item / width, k = item % width;
    shared_p[item] = row < tile.rows && k < count ? p[row * d.rank + k] : 0.0f;
  }
}

// Adds row (first_row + i * kGroups) of the tile's product, at this thread's four columns, to sum[i].
template <int kRows, bool kVector>
__device__ __forceinline__ void product(const float* shared_p, const float* shared_q,
                                        const Quad<kVector>& quad, int first_row, int padded,
                                        float (&sum)[kRows][4]) {
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

// Restores the previous step's residual of a matrix whose M was not finite.
__device__ __forceinline__ void restore(const ReconstructArgs& a, const MatrixDescriptor& d,
                                        const Tile& tile) {
  const int column = tile.column0 + static_cast<int>(threadIdx.x);
  for (int row = tile.row0; column < tile.column0 + tile.columns && row < tile.row0 + tile.rows; ++row) {
    const int64_t at = d.offset + static_cast<int64_t>(row) * d.cols + column;
    if (!is_finite(a.out[at])) continue;  // already holds the old residual
    const float old = a.residual[at] - a.out[at];
    a.residual[at] = is_finite(old) ? old : 0.0f;
  }
}

template <Mode kMode, bool kVector>
__device__ __forceinline__ void reconstruct_tile(const ReconstructArgs& a, const MatrixDescriptor& d,
                                                 const Tile& tile, int matrix, bool flagged, float* shared) {
  constexpr bool kReads = kMode != Mode::reconstruct, kForms = kMode == Mode::form;
  constexpr int kRows = kReads ? 4 : 8;  // rows per thread and pass; more rows would spill registers
  Quad<kVector> quad{kQuads, static_cast<int>(threadIdx.x) % kQuads};
  int group = static_cast<int>(threadIdx.x) / kQuads;
  float* shared_q = shared;
  float* shared_p = shared + a.staged * kQStride;
  const int padded = (d.rank + 3) / 4 * 4;
  const bool staged_once = padded <= kMaxStaged;
  int64_t origin = d.offset + static_cast<int64_t>(tile.row0) * d.cols + tile.column0;

  const bool pending = !kForms || (a.p != nullptr && !flagged);
  if (!kReads && flagged && a.residual != nullptr) restore(a, d, tile);
  if (pending && staged_once) stage_factors(a, d, tile, 0, padded, shared_p, shared_q);
  __syncthreads();
  bool finite = true;
  for (int base = 0; base < tile.rows; base += kRows * kGroups) {
    const int row0 = base + group;
    float sum[kRows][4], gradient[kForms ? kRows : 1][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = row0 + i * kGroups;
      const int limit = kReads && row < tile.rows ? tile.columns : 0;
      const int64_t at = origin + static_cast<int64_t>(row) * d.cols;
      quad.load(a.out + at, limit, sum[i]);
      if constexpr (kForms) quad.load(a.grad + at, limit, gradient[i]);
    }
    for (int k0 = 0; pending && k0 < padded; k0 += kMaxStaged) {
      const int width = min(kMaxStaged, padded - k0);
      if (!staged_once) {
        __syncthreads();
        stage_factors(a, d, tile, k0, width, shared_p, shared_q);
        __syncthreads();
      }
      product<kRows, kVector>(shared_p, shared_q, quad, row0, width, sum);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      int row = row0 + i * kGroups;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if constexpr (kReads) {
          sum[i][c] = is_finite(sum[i][c]) ? sum[i][c] : 0.0f;
        } else {
          sum[i][c] = flagged ? bits_float(0x7fc00000u) : a.scale * sum[i][c];
        }
      }
      if constexpr (kForms) {
        float keep[4];
        add_gradient(gradient[i], sum[i], keep);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          finite = finite && is_finite(sum[i][c]);
          sum[i][c] = keep[c];
        }
      }
      quad.store(a.out + origin + static_cast<int64_t>(row) * d.cols, row < tile.rows ? tile.columns : 0,
                 sum[i]);
    }
  }
  if (kForms && !finite) a.marks[matrix] = 1;  // all writers write the same value
}

template <Mode kMode>
__global__ void __launch_bounds__(kThreads, 2) reconstruct_kernel(const __grid_constant__ ReconstructArgs a) {
  GW_DYNAMIC_SHARED(float, shared);
  int block = a.first_block + static_cast<int>(blockIdx.x);
  __shared__ int found[1];
  int matrix = find_matrix(a.matrices, &MatrixBlocks::tile, block, found);
  const MatrixDescriptor d = a.matrices.descriptors[matrix];
  int across = (d.cols + kTileCols - 1) / kTileCols, index = block - a.matrices.starts[matrix].tile;
  Tile tile{
      .row0 = index / across * kTileRows, .rows = 0, .column0 = index % across * kTileCols, .columns = 0};
  tile.rows = min(kTileRows, d.rows - tile.row0);
  tile.columns = min(kTileCols, d.cols - tile.column0);
  bool flagged = a.flags != nullptr && a.flags[matrix] != 0;
  if (kMode == Mode::settle && flagged) return;
  bool vector =
      d.cols % 4 == 0 && aligned16(a.out + d.offset) && (kMode != Mode::form || aligned16(a.grad + d.offset));
  if (vector) {
    reconstruct_tile<kMode, true>(a, d, tile, matrix, flagged, shared);
  } else {
    reconstruct_tile<kMode, false>(a, d, tile, matrix, flagged, shared);
  }
}

template <Mode kMode>
void launch_reconstruct(const char* name, CudaStream stream, const MatrixTable& table, int32_t blocks,
                        ReconstructArgs a) {
  a.matrices = matrices_of(table);
  a.staged = a.p != nullptr ? std::min((table.max_rank() + 3) / 4 * 4, kMaxStaged) : 0;
  const size_t shared_floats = static_cast<size_t>(a.staged) * (kQStride + kTileRows);
  launch(name, reconstruct_kernel<kMode>,
         {.grid = dim3(static_cast<unsigned>(blocks)),
          .block = dim3(kThreads),
          .shared_bytes = shared_floats * sizeof(float),
          .stream = stream},
         a);
}

}  // namespace

void powersgd_reconstruct(CudaStream stream, const PowerSgdReconstruct& op) {
  launch_reconstruct<Mode::reconstruct>(
      "powersgd_reconstruct", stream, *op.table, op.table->host_blocks().back().tile,
      {.p = op.p, .q = op.q, .out = op.grad, .residual = op.residual, .scale = op.scale, .flags = op.flags});
}

void powersgd_settle(CudaStream stream, const PowerSgdSettle& op) {
  if (op.pending.p == nullptr) return;
  const MatrixBlocks* starts = op.table->host_blocks().data();
  const int32_t first = op.matrix < 0 ? 0 : starts[op.matrix].tile;
  const int32_t end = op.matrix < 0 ? op.table->host_blocks().back().tile : starts[op.matrix + 1].tile;
  launch_reconstruct<Mode::settle>("powersgd_settle", stream, *op.table, end - first,
                                   {.p = op.pending.p,
                                    .q = op.pending.q,
                                    .out = op.residual,
                                    .flags = op.pending.flags,
                                    .first_block = first});
}

void powersgd_form(CudaStream stream, const PowerSgdForm& op) {
  launch_reconstruct<Mode::form>("powersgd_form", stream, *op.table, op.table->host_blocks().back().tile,
                                 {.p = op.pending.p,
                                  .q = op.pending.q,
                                  .out = op.residual,
                                  .grad = op.grad,
                                  .marks = op.marks,
                                  .flags = op.pending.flags});
}

}  // namespace gradwire::cuda
