// PowerSGD pass (c) on CUDA: grad = scale * P Q^T; settle: residual += P Q^T; form: settle, then residual +=
// grad.
//
// Bytes per element: 4; settle 8; form 12. Limit: memory bandwidth up to about rank 32. A block writes a tile
// of 64 rows x 256 columns. Its parts of P and Q are in shared memory. A warp computes 32 columns, a lane 8
// rows x 4 columns at a time (settle and form: 4 x 4), so that a value read from shared memory serves 4 to 8
// multiply-adds. Alignment: any; 16-byte accesses when a matrix's rows are 16-byte aligned. Deterministic:
// each element is one thread's sum over the rank, in order.
#include "kernels/powersgd/powersgd.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kThreads = 256;
static_assert(kThreads / 32 * kWarpTile == kTileCols);
constexpr int kMaxStaged = 64;  // columns of P and Q in shared memory; higher ranks are staged in parts
constexpr int kPlane = (kTileRows + kTileCols) * kPitch;  // floats of 32 staged columns of P and Q

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
};

struct Tile {
  int row0, rows, column0, columns;
};

// Stages up to kMaxStaged columns of P and Q, from k0 on, in planes of 32: the tile's rows of P, then those
// of Q. Elements outside the matrices are zero.
template <bool kByQuads>
__device__ __forceinline__ void stage_factors(const ReconstructArgs& a, const MatrixDescriptor& d,
                                              const Tile& tile, int k0, float* shared) {
  const float* p = a.p + d.p_offset + static_cast<int64_t>(tile.row0) * d.rank + k0;
  const float* q = a.q + d.q_offset + static_cast<int64_t>(tile.column0) * d.rank + k0;
  const bool vector = d.rank % 4 == 0 && aligned16(p) && aligned16(q);
#pragma unroll 1
  for (int left = min(kMaxStaged, d.rank - k0); left > 0; left -= kWarpTile) {
    const int count = min(kWarpTile, left);
    if (vector) {
      stage_rows<kTileRows, true>(p, d.rank, count, tile.rows, shared);
      stage_rows<kTileCols, true, kByQuads>(q, d.rank, count, tile.columns, shared + kTileRows * kPitch);
    } else {
      stage_rows<kTileRows, false>(p, d.rank, count, tile.rows, shared);
      stage_rows<kTileCols, false, kByQuads>(q, d.rank, count, tile.columns, shared + kTileRows * kPitch);
    }
    p += kWarpTile, q += kWarpTile, shared += kPlane;
  }
  end_copies();
  wait_for_copies<0>();
}

// Writes NaN over a matrix whose M was not finite. Restores the previous step's residual, if there is one.
__device__ __forceinline__ void overwrite(const ReconstructArgs& a, const MatrixDescriptor& d,
                                          const Tile& tile) {
  const int column = tile.column0 + static_cast<int>(threadIdx.x);
  for (int row = tile.row0; column < tile.column0 + tile.columns && row < tile.row0 + tile.rows; ++row) {
    const int64_t at = d.offset + static_cast<int64_t>(row) * d.cols + column;
    if (a.residual != nullptr) restore(a.out[at], a.residual[at]);
    a.out[at] = bits_float(0x7fc00000u);
  }
}

// Writes a lane's rows of a tile; `sum` holds the product, added to the residual in the other modes. Returns
// false if M is not finite.
template <Mode kMode, bool kVector, int kRows>
__device__ __forceinline__ bool write_rows(const ReconstructArgs& a, const MatrixTile<kVector>& m,
                                           float (&sum)[kRows][4], const float (&gradient)[kRows][4]) {
  bool finite = true;
  float* out = a.out + m.at;
#pragma unroll
  for (int i = 0; i < kRows; ++i, out += m.step()) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if constexpr (kMode == Mode::reconstruct) {
        sum[i][c] *= a.scale;
      } else {
        sum[i][c] = is_finite(sum[i][c]) ? sum[i][c] : 0.0f;
      }
    }
    if constexpr (kMode == Mode::form) {
      float keep[4];
      add_gradient(gradient[i], sum[i], keep);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        finite &= is_finite(sum[i][c]);
        sum[i][c] = keep[c];
      }
    }
    m.store_row(out, i, sum[i]);
  }
  return finite;
}

template <Mode kMode, bool kVector>
__device__ __forceinline__ void reconstruct_tile(const ReconstructArgs& a, const MatrixDescriptor& d,
                                                 const Tile& tile, int matrix, bool pending, float* shared) {
  constexpr bool kReads = kMode != Mode::reconstruct;
  constexpr int kRows = kReads ? 4 : 8;  // rows per thread and pass; more rows would spill registers
  const TileLane lane;
  const int column0 = static_cast<int>(threadIdx.x) / 32 * kWarpTile;
  const float* shared_p = shared + lane.row * kPitch;
  const float* const shared_q = shared + (kTileRows + column0 + lane.quad) * kPitch;
  const bool staged_once = d.rank <= kMaxStaged;
  if (pending && staged_once) stage_factors<kVector>(a, d, tile, 0, shared);
  __syncthreads();
  MatrixTile<kVector> m(d, lane, tile.row0 + lane.row, tile.rows - lane.row, tile.column0 + column0,
                        tile.columns - column0);
  bool finite = true;
#pragma unroll 1
  for (int base = 0; base < tile.rows; base += 4 * kRows) {
    float sum[kRows][4] = {}, gradient[kRows][4];
    if constexpr (kReads) m.load(a.out, sum);
    if constexpr (kMode == Mode::form) m.load(a.grad, gradient);
#pragma unroll 1
    for (int k0 = 0; pending && k0 < d.rank; k0 += kMaxStaged) {
      if (!staged_once) {
        __syncthreads();
        stage_factors<kVector>(a, d, tile, k0, shared);
        __syncthreads();
      }
#pragma unroll 1
      for (int k = k0; k < min(d.rank, k0 + kMaxStaged); k += kWarpTile) {
        const int plane = (k - k0) / kWarpTile * kPlane;
        add_outer_product(shared_p + plane, shared_q + plane, (min(kWarpTile, d.rank - k) + 3) / 4 * 4, sum);
      }
    }
    finite &= write_rows<kMode>(a, m, sum, gradient);
    shared_p += 4 * kRows * kPitch;
    m.at += kRows * m.step();
    m.rows -= 4 * kRows;
  }
  if (kMode == Mode::form && !finite) a.marks[matrix] = 1;  // all writers write the same value
}

template <Mode kMode>
__global__ void __launch_bounds__(kThreads, 2) reconstruct_kernel(const __grid_constant__ ReconstructArgs a) {
  wait_for_earlier_kernels();
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
  const bool marked = flagged(a.flags, matrix);
  if (kMode == Mode::settle && marked) return;
  if (kMode == Mode::reconstruct && marked) return overwrite(a, d, tile);
  const bool pending = kMode != Mode::form || (a.p != nullptr && !marked);
  bool vector =
      d.cols % 4 == 0 && aligned16(a.out + d.offset) && (kMode != Mode::form || aligned16(a.grad + d.offset));
  if (vector) {
    reconstruct_tile<kMode, true>(a, d, tile, matrix, pending, shared);
  } else {
    reconstruct_tile<kMode, false>(a, d, tile, matrix, pending, shared);
  }
}

template <Mode kMode>
void launch_reconstruct(const char* name, CudaStream stream, const MatrixTable& table, int32_t blocks,
                        ReconstructArgs a) {
  a.matrices = matrices_of(table);
  const int planes = a.p == nullptr ? 0 : table.max_rank() <= kWarpTile ? 1 : kMaxStaged / kWarpTile;
  launch(name, reconstruct_kernel<kMode>,
         {.grid = dim3(static_cast<unsigned>(blocks)),
          .block = dim3(kThreads),
          .shared_bytes = static_cast<size_t>(planes) * kPlane * sizeof(float),
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
