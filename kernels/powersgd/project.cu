// PowerSGD pass (a) on CUDA: E = residual + pending; M = grad + E, stored into residual; P = M Q.
//
// Bytes per element: 12 with residual, 4 without; above rank 32, 8 more where a factor is pending, and M
// again for every 32 columns of Q, mostly from the L2 cache. Limit: memory bandwidth up to about rank 32. The
// order of every sum is fixed. Alignment: any; 16-byte accesses when a matrix's rows are 16-byte aligned in
// both arrays.
//
// Up to rank kMaxNarrowRank, a block takes 8 whole rows and walks over the columns in strips of 1024. Each
// thread holds 8 rows x 4 columns of M in registers; the strip's Q and the pending Q, transposed, are in
// shared memory. Sums over a warp are taken by halving (32 values over 32 lanes cost 31 shuffles, not 160),
// sums over warps at the end.
//
// Above, a block takes 64 rows, and each of its warps 32 rows of every fourth tile of 32 columns. A lane adds
// the pending product and the product with Q, both from shared memory, in register tiles of 8 x 4: 32
// multiply-adds for three 16-byte reads.
#include "kernels/powersgd/powersgd.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kRows = 8;  // rows per thread
constexpr int kThreads = 256;
constexpr int kStrip = 4 * kThreads;
constexpr int kStripStride = kStrip + 4;  // avoids bank conflicts in the transposing stores
constexpr unsigned kAllLanes = 0xffffffffu;

struct ProjectArgs : PowerSgdProject {
  Matrices matrices;
  // Above kMaxNarrowRank: the first column of P, and the number of parts of up to 32 columns.
  int first = 0, parts = 1;
  bool formed = false;  // an earlier launch formed M, and wrote the first columns of P
};

// Sums each of kCount values over the 32 lanes; kCount is a power of 2 up to 32. Afterwards v[0] of lane l is
// the sum of value l / (32 / kCount). In each step a lane sends the half of the values that the partner lane
// continues to sum. The function is recursive so that all indices are compile-time constants.
template <int kCount, int kOffset = 16, int kTotal>
__device__ __forceinline__ void sum_over_lanes(float (&v)[kTotal], int lane) {
  if constexpr (kOffset > 0) {
    if constexpr (kCount > 1) {
      constexpr int kHalf = kCount / 2;
      bool upper = (lane & kOffset) != 0;
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        float give = upper ? v[i] : v[i + kHalf], keep = upper ? v[i + kHalf] : v[i];
        v[i] = keep + __shfl_xor_sync(kAllLanes, give, kOffset);
      }
    } else {
      v[0] += __shfl_xor_sync(kAllLanes, v[0], kOffset);
    }
    sum_over_lanes<(kCount > 1 ? kCount / 2 : 1), kOffset / 2>(v, lane);
  }
}

// Stages the strip's Q as shared[k][column]; elements outside the matrix are zero.
template <int kRank>
__device__ __forceinline__ void stage_q(const float* q, int rank, int columns, float* shared) {
  for (int column = static_cast<int>(threadIdx.x); column < kStrip; column += kThreads) {
    if (kRank == 4 && rank == 4 && aligned16(q)) {
      float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (column < columns) v = *reinterpret_cast<const float4*>(q + static_cast<int64_t>(column) * 4);
      float* to = shared + column;
      to[0] = v.x, to[kStripStride] = v.y, to[2 * kStripStride] = v.z, to[3 * kStripStride] = v.w;
      continue;
    }
#pragma unroll
    for (int k = 0; k < kRank; ++k) {
      const bool there = column < columns && k < rank;
      shared[k * kStripStride + column] = there ? q[static_cast<int64_t>(column) * rank + k] : 0.0f;
    }
  }
}

// Sets sum[i * kRank + k] to the product of the thread's four columns of row i of M and column k of the
// staged Q.
template <int kRank, bool kVector>
__device__ __forceinline__ void multiply_strip(const float (&m)[kRows][4], const float* staged_q,
                                               const Quad<kVector>& quad, float (&sum)[kRows * kRank]) {
#pragma unroll
  for (int k = 0; k < kRank; ++k) {
    float q[4];
    quad.load(staged_q + k * kStripStride, kStrip, q);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float s = m[i][0] * q[0];
      s = fmaf(m[i][1], q[1], s);
      s = fmaf(m[i][2], q[2], s);
      sum[i * kRank + k] = fmaf(m[i][3], q[3], s);
    }
  }
}

// Shared memory holds the staged Q, the pending Q, the pending P (by column, row), and the sums (by warp,
// row, column).
template <int kRank, bool kVector>
__device__ __forceinline__ void project_rows(const ProjectArgs& a, const MatrixDescriptor& d, bool pending,
                                             int row0, float* shared) {
  constexpr int kValues = kRows * kRank, kLanesPerValue = 32 / kValues;
  constexpr int kBatch = kVector ? 4 : 2;  // rows per thread and load; more rows would spill registers
  static_assert(kValues <= 32);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  Quad<kVector> quad{kThreads, thread};
  const int pending_rank = pending ? d.rank : 0;
  float* pending_q = shared + kRank * kStripStride;
  float* pending_p = pending_q + (a.pending.p != nullptr ? kRank * kStripStride : 0);
  float* sums = pending_p + kRank * kRows;  // (warps, kValues)
  for (int item = thread; item < pending_rank * kRows; item += kThreads) {
    const int row = row0 + item % kRows;
    pending_p[item] =
        row < d.rows ? a.pending.p[d.p_offset + static_cast<int64_t>(row) * d.rank + item / kRows] : 0.0f;
  }
  float total = 0.0f;
  for (int column0 = 0; column0 < d.cols; column0 += kStrip) {
    const int columns = min(kStrip, d.cols - column0);
    float m[kRows][4], sum[kValues];
    const int64_t at = d.offset + static_cast<int64_t>(row0) * d.cols + column0;
    const int64_t q_at = d.q_offset + static_cast<int64_t>(column0) * d.rank;
    __syncthreads();  // the last strip's readers are done
    if (pending) stage_q<kRank>(a.pending.q + q_at, d.rank, columns, pending_q);
    stage_q<kRank>(a.q + q_at, d.rank, columns, shared);
    __syncthreads();
#pragma unroll
    for (int first = 0; first < kRows; first += kBatch) {
      const auto limit = [&](int i) { return row0 + first + i < d.rows ? columns : 0; };
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        quad.load(a.grad + at + (first + i) * int64_t{d.cols}, limit(i), m[first + i]);
      }
      if (a.residual == nullptr) continue;
      form_rows<kBatch>(
          quad, a.residual + at + first * int64_t{d.cols}, d.cols, limit, pending_rank,
          [&](int i, int k) { return pending_p[k * kRows + first + i]; },
          [&](int k, float(&q)[4]) { quad.load(pending_q + k * kStripStride, kStrip, q); }, m + first);
    }
    multiply_strip<kRank>(m, shared, quad, sum);
    sum_over_lanes<kValues>(sum, lane);
    total = column0 == 0 ? sum[0] : total + sum[0];
  }
  if (lane % kLanesPerValue == 0) sums[warp * kValues + lane / kLanesPerValue] = total;
  __syncthreads();
  const int row = row0 + thread / kRank, k = thread % kRank;
  if (thread >= kValues || row >= d.rows || k >= d.rank) return;
  total = 0.0f;
  for (int w = 0; w < kThreads / 32; ++w) total += sums[w * kValues + thread];
  a.p[d.p_offset + static_cast<int64_t>(row) * d.rank + k] = total;
}

__device__ __forceinline__ bool vector_rows(const ProjectArgs& a, const MatrixDescriptor& d) {
  return d.cols % 4 == 0 && aligned16(a.grad + d.offset) &&
         (a.residual == nullptr || aligned16(a.residual + d.offset));
}

template <int kRank>
__global__ void __launch_bounds__(kThreads, 2) project_kernel(const __grid_constant__ ProjectArgs a) {
  wait_for_earlier_kernels();
  GW_DYNAMIC_SHARED(float, shared);
  __shared__ int found[1];
  const int tile = static_cast<int>(blockIdx.x);
  const int matrix = find_matrix(a.matrices, &MatrixBlocks::row_tile, tile, found);
  const MatrixDescriptor d = a.matrices.descriptors[matrix];
  const int row0 = (tile - a.matrices.starts[matrix].row_tile) * kRowTileRows;
  const bool pending = a.pending.exist(matrix);
  if (vector_rows(a, d)) {
    project_rows<kRank, true>(a, d, pending, row0, shared);
  } else {
    project_rows<kRank, false>(a, d, pending, row0, shared);
  }
}

template <int kRank>
void launch_project(CudaStream stream, const ProjectArgs& a, const MatrixTable& table) {
  static_assert(kRowTileRows == kRows);
  const int factors = a.pending.p != nullptr ? 2 : 1;  // staged: Q, and the pending Q
  const int floats = kRank * (factors * kStripStride + kRows + kThreads / 32 * kRows);
  launch("powersgd_project", project_kernel<kRank>,
         {.grid = dim3(static_cast<unsigned>(table.host_blocks().back().row_tile)),
          .block = dim3(kThreads),
          .shared_bytes = static_cast<size_t>(floats) * sizeof(float),
          .stream = stream},
         a);
}

// Above kMaxNarrowRank. Shared memory: 128 rows of the pending Q and of Q (unless M is formed, of two steps'
// Q), 64 rows of the pending P, and a tile of M of each warp.

constexpr int kSlices = 4;  // warps that share rows
constexpr int kStepColumns = kSlices * kWarpTile;
constexpr int kFactorFloats = kStepColumns * kPitch, kTileFloats = kWarpTile * kPitch;
constexpr int kWideFloats = 2 * kFactorFloats + kWideRowTileRows * kPitch + kThreads / 32 * kTileFloats;

// Copies the gradient to the lane's places in `tile` in the background.
template <bool kVector>
__device__ __forceinline__ void copy_gradient(const MatrixTile<kVector>& m, const float* grad, float* tile) {
  grad += m.at, tile += m.quad.column(0);
#pragma unroll
  for (int i = 0; i < kRows; ++i, grad += m.step()) {
#pragma unroll
    for (int c = 0; c < 4; c += kVector ? 4 : 1) {
      copy_async<kVector ? 16 : 4>(tile + 4 * i * kPitch + 8 * c, grad + 8 * c, m.there(i, c));
    }
  }
}

// Adds the gradient in `tile` to E. Writes M there and stores it into the residual.
template <bool kVector>
__device__ __forceinline__ void form_m(const MatrixTile<kVector>& m, float* residual, float* tile,
                                       float (&e)[kRows][4]) {
  float gradient[4];
  bool finite = true;  // where sums are finite, so are E and the gradient
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    m.quad.load(tile + 4 * i * kPitch, kWarpTile, gradient);
#pragma unroll
    for (int c = 0; c < 4; ++c) finite &= fabsf(gradient[c] + e[i][c]) <= FLT_MAX;
  }
  __syncwarp();  // so that the compiler does not keep the gradient in registers
  residual += m.at;
  if (__all_sync(kAllLanes, finite)) {
#pragma unroll
    for (int i = 0; i < kRows; ++i, residual += m.step()) {
      m.quad.load(tile + 4 * i * kPitch, kWarpTile, gradient);
#pragma unroll
      for (int c = 0; c < 4; ++c) gradient[c] += e[i][c];
      m.store_row(residual, i, gradient);
      m.quad.store(tile + 4 * i * kPitch, kWarpTile, gradient);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i, residual += m.step()) {
    float keep[4];
    m.quad.load(tile + 4 * i * kPitch, kWarpTile, gradient);
#pragma unroll
    for (int c = 0; c < 4; ++c) e[i][c] = is_finite(e[i][c]) ? e[i][c] : 0.0f;
    add_gradient(gradient, e[i], keep);
    m.store_row(residual, i, keep);
    m.quad.store(tile + 4 * i * kPitch, kWarpTile, e[i]);
  }
}

// Adds the product of a tile of M and 32 rows of Q: eight rows, four columns. Steps of two columns of M leave
// registers for the next tile.
__device__ __forceinline__ void multiply_tile(const float* m, const float* q, float (&acc)[kRows][4]) {
#pragma unroll 1
  for (int column = 0; column < kWarpTile; column += 2) {
    const float4 right[2] = {*reinterpret_cast<const float4*>(q + column * kPitch),
                             *reinterpret_cast<const float4*>(q + (column + 1) * kPitch)};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float2 v = *reinterpret_cast<const float2*>(m + 4 * i * kPitch + column);
      const float left[2] = {v.x, v.y};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        acc[i][0] = fmaf(left[j], right[j].x, acc[i][0]);
        acc[i][1] = fmaf(left[j], right[j].y, acc[i][1]);
        acc[i][2] = fmaf(left[j], right[j].z, acc[i][2]);
        acc[i][3] = fmaf(left[j], right[j].w, acc[i][3]);
      }
    }
  }
}

// Computes the block's part of P, of columns k0 to k0 + 31; forms M if kForms. `sums` receives the slices'
// sums, (64 rows, 32 columns) each.
template <bool kForms, bool kVector>
__device__ __forceinline__ void project_wide_rows(const ProjectArgs& a, const MatrixDescriptor& d,
                                                  bool pending, int row0, int k0, float* shared,
                                                  float* sums) {
  const TileLane lane;
  const int warp = static_cast<int>(threadIdx.x) / 32, slice = warp / 2,
            row = warp % 2 * kWarpTile + lane.row;
  float* const pending_p = shared + 2 * kFactorFloats;
  float* const tile = sums + warp * kTileFloats + lane.row * kPitch;
  const int width = kForms ? d.rank : min(kWarpTile, d.rank - k0);
  int64_t q_at = d.q_offset;  // of the columns staged next
  MatrixTile<kVector> m(d, lane, row0 + row, d.rows - row0 - row, slice * kWarpTile,
                        d.cols - slice * kWarpTile);
  float e[kRows][4], acc[kRows][4] = {};
  m.load(kForms ? a.residual : a.grad, e);
  if (kForms && pending) {
    stage_rows<kWideRowTileRows, kVector>(a.pending.p + d.p_offset + static_cast<int64_t>(row0) * d.rank,
                                          d.rank, width, d.rows - row0, pending_p);
    stage_rows<kStepColumns, kVector, kVector>(a.pending.q + q_at, d.rank, width, d.cols, shared);
  } else if (!kForms) {
    stage_rows<kStepColumns, kVector>(a.q + q_at + k0, d.rank, width, d.cols, shared);
  }
  end_copies();
  int buffer = kForms ? kFactorFloats : 0;  // where Q is
#pragma unroll 1
  while (m.columns + slice * kWarpTile > 0) {
    const int left = m.columns + slice * kWarpTile;
    __syncwarp();  // the readers of the tile are done
    if constexpr (kForms) {
      copy_gradient(m, a.grad, tile);
      end_copies();
      wait_for_copies<1>();
      __syncthreads();  // the pending factors are there; the readers of Q are done
      stage_rows<kStepColumns, kVector>(a.q + q_at, d.rank, width, left, shared + kFactorFloats);
      end_copies();
      if (pending) {
        add_outer_product(pending_p + row * kPitch, shared + (slice * kWarpTile + lane.quad) * kPitch,
                          (width + 3) / 4 * 4, e);
      }
      wait_for_copies<0>();
      form_m(m, a.residual, tile, e);
    } else {
      wait_for_copies<0>();
#pragma unroll
      for (int i = 0; i < kRows; ++i) m.quad.store(tile + 4 * i * kPitch, kWarpTile, e[i]);
    }
    __syncthreads();  // M and Q are there; the readers of the pending Q, or of the last Q, are done
    const float* const q = shared + buffer + slice * kWarpTile * kPitch + 4 * lane.quad;
    m.at += kStepColumns;
    m.columns -= kStepColumns;
    q_at += int64_t{kStepColumns} * d.rank;
    if (left > kStepColumns) {
      if constexpr (!kForms) {
        buffer = kFactorFloats - buffer;
        stage_rows<kStepColumns, kVector>(a.q + q_at + k0, d.rank, width, left - kStepColumns,
                                          shared + buffer);
      } else if (pending) {
        stage_rows<kStepColumns, kVector, kVector>(a.pending.q + q_at, d.rank, width, left - kStepColumns,
                                                   shared);
      }
      m.load(kForms ? a.residual : a.grad, e);
    }
    end_copies();
    multiply_tile(tile, q, acc);
  }
  __syncthreads();
  sums += (slice * kWideRowTileRows + row) * kWarpTile + 4 * lane.quad;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    *reinterpret_cast<float4*>(sums + 4 * i * kWarpTile) =
        make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
  }
  __syncthreads();
}

template <bool kForms>
__global__ void __launch_bounds__(kThreads, 2) project_wide_kernel(const __grid_constant__ ProjectArgs a) {
  wait_for_earlier_kernels();
  GW_DYNAMIC_SHARED(float, shared);
  __shared__ int found[1];
  float* const sums = shared + 2 * kFactorFloats + kWideRowTileRows * kPitch;  // in place of M
  const int part = static_cast<int>(blockIdx.x) % a.parts, k0 = kForms ? 0 : a.first + part * kWarpTile;
  const int block = static_cast<int>(blockIdx.x) / a.parts;
  {
    const int matrix = find_matrix(a.matrices, &MatrixBlocks::wide_row_tile, block, found);
    const MatrixDescriptor d = a.matrices.descriptors[matrix];
    if (k0 >= d.rank) return;
    const int row0 = (block - a.matrices.starts[matrix].wide_row_tile) * kWideRowTileRows;
    const bool pending = a.pending.exist(matrix);
    if (vector_rows(a, d) && d.rank % 4 == 0 && aligned16(a.q + d.q_offset) &&
        (!pending || (aligned16(a.pending.q + d.q_offset) && aligned16(a.pending.p + d.p_offset)))) {
      project_wide_rows<kForms, true>(a, d, pending, row0, k0, shared, sums);
    } else {
      project_wide_rows<kForms, false>(a, d, pending, row0, k0, shared, sums);
    }
  }
  // Adds the slices' sums. Reads the descriptor again to save registers.
  const MatrixDescriptor d = a.matrices.descriptors[found[0]];
  const int row0 = (block - a.matrices.starts[found[0]].wide_row_tile) * kWideRowTileRows;
  const int k = static_cast<int>(threadIdx.x) % kWarpTile;
  for (int row = static_cast<int>(threadIdx.x) / kWarpTile; row < min(kWideRowTileRows, d.rows - row0);
       row += kThreads / kWarpTile) {
    float sum = 0.0f;
    for (int s = 0; s < kSlices; ++s) sum += sums[(s * kWideRowTileRows + row) * kWarpTile + k];
    float* const p = a.p + d.p_offset + static_cast<int64_t>(row0 + row) * d.rank;
    // The residual is finite even where M is not, which P's first column shows.
    if (k0 + k < d.rank) p[k0 + k] = a.formed && !is_finite(p[0]) ? p[0] : sum;
  }
}

void launch_project_wide(CudaStream stream, const ProjectArgs& a, const MatrixTable& table) {
  launch("powersgd_project", a.residual != nullptr ? project_wide_kernel<true> : project_wide_kernel<false>,
         {.grid = dim3(static_cast<unsigned>(table.host_blocks().back().wide_row_tile * a.parts)),
          .block = dim3(kThreads),
          .shared_bytes = size_t{kWideFloats} * sizeof(float),
          .stream = stream},
         a);
}

}  // namespace

void powersgd_project(CudaStream stream, const PowerSgdProject& op) {
  const MatrixTable& table = *op.table;
  ProjectArgs a{op, matrices_of(table)};
  const int rank = table.max_rank(), parts = (rank + kWarpTile - 1) / kWarpTile;
  if (rank <= kMaxNarrowRank) {
    with_narrow_rank(rank, [&]<int kRank>() { launch_project<kRank>(stream, a, table); });
  } else if (parts == 1 || op.residual == nullptr) {
    a.parts = parts;
    launch_project_wide(stream, a, table);
  } else {
    // The pending factors do not fit in shared memory. Arithmetic is the limit at these ranks.
    powersgd_settle(stream, {.table = op.table, .residual = op.residual, .pending = op.pending});
    a.pending = {};
    launch_project_wide(stream, a, table);
    a.grad = op.residual, a.residual = nullptr;
    a.first = kWarpTile, a.parts = parts - 1, a.formed = true;
    launch_project_wide(stream, a, table);
  }
}

}  // namespace gradwire::cuda
