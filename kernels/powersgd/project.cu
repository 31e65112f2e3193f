// PowerSGD pass (a) on CUDA: E = residual + pending; M = grad + E, stored into residual; P = M Q.
//
// Bytes per element: 12 with residual, 4 without. Limit: memory bandwidth up to about rank 32. A block takes
// 8 or 16 whole rows and walks over the columns in strips of 1024. Each thread holds 8 rows x 4 columns of M
// in registers, while the strip's Q, transposed, passes through shared memory, up to 8 columns at a time. The
// pending product is also added from shared memory. Sums over a warp are taken by halving (32 values over 32
// lanes cost 31 shuffles, not 160), sums over warps at the end. M is therefore read once for any rank, and
// the order of every sum is fixed. Alignment: any; 16-byte accesses when a matrix's rows are 16-byte aligned
// in both arrays.
#include "kernels/powersgd/powersgd.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kRows = 8;  // rows per thread

constexpr int kStripThreads = 256;  // threads that share a row
constexpr int kStrip = 4 * kStripThreads;
constexpr int kStripStride = kStrip + 4;  // avoids bank conflicts in the transposing stores
// Up to this rank the pending factors fit in shared memory. For higher ranks a separate kernel first adds the
// product, which moves 8 more bytes per element; arithmetic is already the limit there.
constexpr int kMaxPendingRank = 16;
// Columns of P per launch, whose sums fit in shared memory. Later launches read M from the residual.
constexpr int kMaxColumns = 64;
constexpr unsigned kAllLanes = 0xffffffffu;

struct ProjectArgs {
  Matrices matrices;
  const float* grad;
  float* residual;
  PendingFactors pending;
  const float* q;
  float* p;
  int padded_pending;  // the pending rank, rounded up to the kernel's kRank: sizes the shared arrays
  int first;           // first column of P
  bool formed;         // an earlier launch formed M, and wrote the first columns of P
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

// Stages columns [k0, k0 + kRank) of the strip's Q as shared[k][column]; elements outside the matrix are
// zero.
template <int kRank>
__device__ __forceinline__ void stage_q(const float* q, int rank, int k0, int columns, float* shared) {
  int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  if (kRank % 4 == 0 && rank % 4 == 0 && aligned16(q)) {
    constexpr int kQuads = kRank >= 4 ? kRank / 4 : 1;
    for (int item = thread; item < kStrip * kQuads; item += threads) {
      int column = item / kQuads, k = item % kQuads * 4;
      float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (column < columns && k0 + k < rank) {
        v = *reinterpret_cast<const float4*>(q + static_cast<int64_t>(column) * rank + k0 + k);
      }
      float* to = shared + k * kStripStride + column;
      to[0] = v.x, to[kStripStride] = v.y, to[2 * kStripStride] = v.z, to[3 * kStripStride] = v.w;
    }
  } else {
    for (int column = thread; column < kStrip; column += threads) {
#pragma unroll
      for (int k = 0; k < kRank; ++k) {
        bool there = column < columns && k0 + k < rank;
        shared[k * kStripStride + column] = there ? q[static_cast<int64_t>(column) * rank + k0 + k] : 0.0f;
      }
    }
  }
}

// Forms M for four columns of kBatch rows, starting at row `first` of m, and stores M with error feedback.
// All loads come before the first store: a store waits for its value, and later loads would wait for the
// store. `pending_q` (rank, kStripStride) and `pending_p` (rank, kRows) are in shared memory; rank is 0 if
// nothing is pending.
template <int kBatch, bool kVector>
__device__ __forceinline__ void load_m(const ProjectArgs& a, const Quad<kVector>& quad, int64_t at,
                                       int64_t stride, int first, int rows, int columns, int rank,
                                       const float* pending_q, const float* pending_p, float (&m)[kRows][4]) {
#pragma unroll
  for (int i = first; i < first + kBatch; ++i) {
    quad.load(a.grad + at + i * stride, i < rows ? columns : 0, m[i]);
  }
  if (a.residual == nullptr) return;
  float e[kBatch][4];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    quad.load(a.residual + at + (first + i) * stride, first + i < rows ? columns : 0, e[i]);
  }
#pragma unroll 1
  for (int k = 0; k < rank; ++k) {
    float q[4];
    quad.load(pending_q + k * kStripStride, kStrip, q);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) e[i][c] = fmaf(pending_p[k * kRows + first + i], q[c], e[i][c]);
    }
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    float keep[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) e[i][c] = is_finite(e[i][c]) ? e[i][c] : 0.0f;
    add_gradient(m[first + i], e[i], keep);
#pragma unroll
    for (int c = 0; c < 4; ++c) m[first + i][c] = e[i][c];
    quad.store(a.residual + at + (first + i) * stride, first + i < rows ? columns : 0, keep);
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

// Writes a group's rows of P: adds the sums of the warps that share the rows, in order.
template <int kRank>
__device__ __forceinline__ void write_p(const ProjectArgs& a, const MatrixDescriptor& d, int row0, int thread,
                                        int chunks, const float* sums) {
  constexpr int kValues = kRows * kRank, kWarps = kStripThreads / 32;
  for (int value = thread; value < chunks * kValues; value += kStripThreads) {
    const int row = row0 + value % kValues / kRank, k = a.first + value / kValues * kRank + value % kRank;
    if (row >= d.rows || k >= d.rank) continue;
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += sums[value + w * chunks * kValues];
    float* const p = a.p + d.p_offset + static_cast<int64_t>(row) * d.rank;
    // The residual is finite even where M is not, which P's first column shows.
    p[k] = a.formed && !is_finite(p[0]) ? p[0] : sum;
  }
}

// Computes the products with `chunks` times kRank columns of Q. Shared memory holds the staged Q, the pending
// Q, the pending P (by group, column, row), and the sums (by warp, row, column).
template <int kRank, int kGroups, bool kVector>
__device__ __forceinline__ void project_rows(const ProjectArgs& a, const MatrixDescriptor& d, bool pending,
                                             int row0, float* shared) {
  constexpr int kValues = kRows * kRank, kLanesPerValue = 32 / kValues;
  // Rows per thread and load; more rows would spill registers.
  constexpr int kBatch = kGroups == 1 && kVector ? 4 : 2;
  static_assert(kValues <= 32);
  int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  int chunks = (min(d.rank - a.first, kMaxColumns) + kRank - 1) / kRank;
  Quad<kVector> quad{kStripThreads, thread % kStripThreads};
  const int pending_rank = pending ? d.rank : 0;
  float* pending_q = shared + kRank * kStripStride;
  float* pending_p = pending_q + a.padded_pending * kStripStride;  // (groups, padded_pending, kRows)
  float* sums = pending_p + kGroups * a.padded_pending * kRows;    // (warps, chunks, kValues)
  pending_p += thread / kStripThreads * a.padded_pending * kRows;
  for (int item = quad.index; item < pending_rank * kRows; item += kStripThreads) {
    const int row = row0 + item % kRows;
    pending_p[item] =
        row < d.rows ? a.pending.p[d.p_offset + static_cast<int64_t>(row) * d.rank + item / kRows] : 0.0f;
  }
  // Until the end, only one lane uses each sum.
  float* lane_sum = sums + warp * chunks * kValues + lane / kLanesPerValue;

  for (int column0 = 0; column0 < d.cols; column0 += kStrip) {
    int columns = min(kStrip, d.cols - column0);
    float m[kRows][4];
    const int64_t at = d.offset + static_cast<int64_t>(row0) * d.cols + column0;
    if (pending) {
#pragma unroll 1
      for (int k0 = 0; k0 < pending_rank; k0 += kRank) {
        stage_q<kRank>(a.pending.q + d.q_offset + static_cast<int64_t>(column0) * d.rank, d.rank, k0, columns,
                       pending_q + k0 * kStripStride);
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kRows; i += kBatch) {
      load_m<kBatch, kVector>(a, quad, at, d.cols, i, d.rows - row0, columns, pending_rank, pending_q,
                              pending_p, m);
    }
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      __syncthreads();  // the last chunk's readers are done
      stage_q<kRank>(a.q + d.q_offset + static_cast<int64_t>(column0) * d.rank, d.rank,
                     a.first + chunk * kRank, columns, shared);
      __syncthreads();
      float sum[kValues];
      multiply_strip<kRank>(m, shared, quad, sum);
      sum_over_lanes<kValues>(sum, lane);
      if (lane % kLanesPerValue == 0) {
        float* total = lane_sum + chunk * kValues;
        *total = column0 == 0 ? sum[0] : *total + sum[0];
      }
    }
  }

  __syncthreads();
  constexpr int kWarps = kStripThreads / 32;
  write_p<kRank>(a, d, row0, quad.index, chunks, sums + warp / kWarps * kWarps * chunks * kValues);
}

// Runs kGroups groups of 256 threads with 8 rows each. Two groups share a staged Q where staging is
// expensive.
template <int kRank, int kGroups>
__global__ void __launch_bounds__(kGroups* kStripThreads)
    project_kernel(const __grid_constant__ ProjectArgs a) {
  constexpr int kBlocksPerTile = kRowTileRows / (kRows * kGroups);
  GW_DYNAMIC_SHARED(float, shared);
  __shared__ int found[1];
  int tile = static_cast<int>(blockIdx.x) / kBlocksPerTile,
      half = static_cast<int>(blockIdx.x) % kBlocksPerTile;
  int matrix = find_matrix(a.matrices, &MatrixBlocks::row_tile, tile, found);
  const MatrixDescriptor d = a.matrices.descriptors[matrix];
  if (d.rank <= a.first) return;
  int row0 = (tile - a.matrices.starts[matrix].row_tile) * kRowTileRows + half * kRows +
             static_cast<int>(threadIdx.x) / kStripThreads * kRows;
  bool vector = d.cols % 4 == 0 && aligned16(a.grad + d.offset) &&
                (a.residual == nullptr || aligned16(a.residual + d.offset));
  const bool pending = is_pending(a.pending, matrix);
  if (vector) {
    project_rows<kRank, kGroups, true>(a, d, pending, row0, shared);
  } else {
    project_rows<kRank, kGroups, false>(a, d, pending, row0, shared);
  }
}

template <int kRank, int kGroups>
void launch_project(CudaStream stream, ProjectArgs a, const MatrixTable& table) {
  constexpr int kBlocksPerTile = kRowTileRows / (kRows * kGroups), kThreads = kGroups * kStripThreads;
  int chunks = (std::min(table.max_rank() - a.first, kMaxColumns) + kRank - 1) / kRank;
  a.padded_pending = a.pending.p != nullptr ? chunks * kRank : 0;
  int floats = (kRank + a.padded_pending) * kStripStride + kGroups * a.padded_pending * kRows +
               kThreads / 32 * chunks * kRows * kRank;
  launch("powersgd_project", project_kernel<kRank, kGroups>,
         {.grid = dim3(static_cast<unsigned>(table.host_blocks().back().row_tile * kBlocksPerTile)),
          .block = dim3(kThreads),
          .shared_bytes = static_cast<size_t>(floats) * sizeof(float),
          .stream = stream},
         a);
}

}  // namespace

void powersgd_project(CudaStream stream, const PowerSgdProject& op) {
  ProjectArgs a{matrices_of(*op.table), op.grad, op.residual, op.pending, op.q, op.p, 0, 0, false};
  int rank = op.table->max_rank();
  if (rank > kMaxPendingRank && op.pending.p != nullptr) {
    powersgd_settle(stream, {.table = op.table, .residual = op.residual, .pending = op.pending});
    a.pending = {};
  }
  if (rank <= 1) {
    launch_project<1, 1>(stream, a, *op.table);
  } else if (rank <= 2) {
    launch_project<2, 1>(stream, a, *op.table);
  } else if (rank <= 8) {
    launch_project<4, 1>(stream, a, *op.table);
  } else {
    launch_project<4, 2>(stream, a, *op.table);
  }
  if (op.residual != nullptr) a.grad = op.residual;
  a.residual = nullptr;
  a.formed = op.residual != nullptr;
  for (a.first = kMaxColumns; a.first < rank; a.first += kMaxColumns) {
    launch_project<4, 2>(stream, a, *op.table);
  }
}

}  // namespace gradwire::cuda
