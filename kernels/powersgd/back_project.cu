// PowerSGD passes (b) and (d) on CUDA: Q = M^T P; or E = residual + pending, M = grad + E, stored into
// residual, and Q = M^T P.
//
// Bytes per element: 4 B in pass (b), 12 B in pass (d). Limit: memory bandwidth up to about rank 8. Up to
// rank kMaxNarrowRank, a block takes a panel of 16 or 32 whole columns. Each thread owns four columns, and
// rows at a fixed stride; as the panel streams in, the thread accumulates its part of Q in registers. Parts
// are summed over a warp's lanes, then over warps in order. Blocks are independent of each other. Alignment:
// any; 16-byte accesses when a matrix's rows are 16-byte aligned.
#include "kernels/powersgd/powersgd.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;

struct BackProjectArgs {
  Matrices matrices;
  const float* m;             // M, or the gradient to form it from
  float* residual = nullptr;  // project_onto with error feedback: M is formed
  PendingFactors pending = {};
  const float* p;
  float* q;
  const int32_t* flags = nullptr;
  int first = 0;  // above 0: an earlier launch formed M, and wrote the columns of Q before this one
};

// Loads the first kRank columns of a row of P; columns beyond the rank are zero.
template <int kRank>
__device__ __forceinline__ void load_p(const float* row, int rank, bool vector, float (&p)[kRank]) {
  if constexpr (kRank == 4) {
    if (vector) {
      float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (rank > 0) v = *reinterpret_cast<const float4*>(row);
      p[0] = v.x, p[1] = v.y, p[2] = v.z, p[3] = v.w;
      return;
    }
  }
#pragma unroll
  for (int k = 0; k < kRank; ++k) p[k] = k < rank ? row[k] : 0.0f;
}

struct Panel {
  int column0, columns, width;  // width: panel_columns(); columns: the panel's columns within the matrix
  float* parts;                 // shared memory: (kWarps, width * kRank)
};

// Sums acc over the block and writes the first kRank columns of the panel's Q.
template <int kRank, bool kVector>
__device__ __forceinline__ void combine(const BackProjectArgs& a, const MatrixDescriptor& d,
                                        const Panel& panel, const Quad<kVector>& quad,
                                        float (&acc)[4][kRank]) {
  int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int offset = 16; offset >= quad.spread; offset /= 2) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int k = 0; k < kRank; ++k) acc[c][k] += __shfl_xor_sync(kAllLanes, acc[c][k], offset);
    }
  }
  if (lane < quad.spread) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int k = 0; k < kRank; ++k) {
        panel.parts[(warp * panel.width + quad.column(c)) * kRank + k] = acc[c][k];
      }
    }
  }
  __syncthreads();
  int item = static_cast<int>(threadIdx.x), column = item / kRank, k = item % kRank;
  if (column < panel.columns && k < d.rank) {
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += panel.parts[w * panel.width * kRank + item];
    a.q[d.q_offset + static_cast<int64_t>(panel.column0 + column) * d.rank + k] = sum;
  }
}

template <int kRank, bool kForms, bool kVector>
__device__ __forceinline__ void back_project_panel(const BackProjectArgs& a, const MatrixDescriptor& d,
                                                   bool pending, const Panel& panel) {
  constexpr int kBatch = kForms ? 2 : 4;  // rows per thread and load; more rows would spill registers
  Quad<kVector> quad{panel.width / 4, static_cast<int>(threadIdx.x) % (panel.width / 4)};
  int row_of_thread = static_cast<int>(threadIdx.x) / quad.spread, row_step = kThreads / quad.spread;
  const float* p = a.p + d.p_offset;
  bool p_vector = d.rank % 4 == 0 && aligned16(p);
  const int64_t pending_q = d.q_offset + static_cast<int64_t>(panel.column0) * d.rank;
  float acc[4][kRank] = {};
#pragma unroll 1
  for (int row0 = row_of_thread; row0 < d.rows; row0 += kBatch * row_step) {
    float m[kBatch][4], weights[kBatch][kRank];
    const int64_t at = d.offset + panel.column0 + static_cast<int64_t>(row0) * d.cols;
    const int64_t step = static_cast<int64_t>(row_step) * d.cols;
    const auto limit = [&](int b) { return row0 + b * row_step < d.rows ? panel.columns : 0; };
#pragma unroll
    for (int b = 0; b < kBatch; ++b) quad.load(a.m + at + b * step, limit(b), m[b]);
    if constexpr (kForms) {
      form_rows<kBatch>(
          quad, a.residual + at, step, limit, pending ? d.rank : 0,
          [&](int b, int k) {
            const int row = row0 + b * row_step;
            return row < d.rows ? a.pending.p[d.p_offset + static_cast<int64_t>(row) * d.rank + k] : 0.0f;
          },
          [&](int k, float(&q)[4]) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              const int column = quad.column(c);
              q[c] = column < panel.columns ? a.pending.q[pending_q + int64_t{column} * d.rank + k] : 0.0f;
            }
          },
          m);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int row = row0 + b * row_step;
      load_p<kRank>(p + static_cast<int64_t>(row) * d.rank, row < d.rows ? d.rank : 0, p_vector, weights[b]);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
#pragma unroll
        for (int k = 0; k < kRank; ++k) acc[c][k] = fmaf(m[b][c], weights[b][k], acc[c][k]);
      }
    }
  }
  combine<kRank>(a, d, panel, quad, acc);
}

template <int kRank, bool kForms>
__global__ void __launch_bounds__(kThreads, 2)
    back_project_kernel(const __grid_constant__ BackProjectArgs a) {
  wait_for_earlier_kernels();
  GW_DYNAMIC_SHARED(float, shared);
  int block = static_cast<int>(blockIdx.x);
  __shared__ int found[1];
  int matrix = find_matrix(a.matrices, &MatrixBlocks::panel, block, found);
  const MatrixDescriptor d = a.matrices.descriptors[matrix];
  Panel panel;
  panel.width = panel_columns(d.rows);
  panel.column0 = (block - a.matrices.starts[matrix].panel) * panel.width;
  panel.columns = min(panel.width, d.cols - panel.column0);
  panel.parts = shared;
  if (flagged(a.flags, matrix)) {  // M was not finite
    for (int item = static_cast<int>(threadIdx.x); item < panel.columns * d.rank; item += kThreads) {
      a.q[d.q_offset + static_cast<int64_t>(panel.column0) * d.rank + item] = 0.0f;
    }
    return;
  }
  const bool pending = a.pending.exist(matrix);
  if (d.cols % 4 == 0 && aligned16(a.m + d.offset) && (!kForms || aligned16(a.residual + d.offset))) {
    back_project_panel<kRank, kForms, true>(a, d, pending, panel);
  } else {
    back_project_panel<kRank, kForms, false>(a, d, pending, panel);
  }
}

template <bool kForms>
void launch_back_project(CudaStream stream, const MatrixTable& table, const BackProjectArgs& a) {
  with_narrow_rank(table.max_rank(), [&]<int kRank>() {
    launch(kForms ? "powersgd_project_onto" : "powersgd_back_project", back_project_kernel<kRank, kForms>,
           {.grid = dim3(static_cast<unsigned>(table.host_blocks().back().panel)),
            .block = dim3(kThreads),
            .shared_bytes = size_t{kWarps * kMaxPanelColumns * kRank} * sizeof(float),
            .stream = stream},
           a);
  });
}

// Above kMaxNarrowRank: a block computes 64 columns x 32 columns of P, and M is read once for 32 columns.
// Stages of 64 rows of both pass through shared memory, copied while the last two are multiplied. Each warp
// multiplies every eighth row: a lane adds 8 x 8 products of four 16-byte reads. The warps' sums are added in
// order at the end.

constexpr int kStages = 3, kStageRows = 64;
constexpr int kPlane = kStageRows * kPitch;  // floats of 32 columns of M or P
constexpr int kStageFloats = (kWidePanelColumns / kWarpTile + 1) * kPlane;

struct WidePanel {
  const float *m, *p;  // the block's columns, from the first row that is not staged yet
  int cols, rank;
  int columns, factors;  // the number of columns of M and of P within the matrix
  int rows;              // rows left
  bool formed;           // the first column of Q shows where M was not finite; the residual is finite
};

template <bool kVector>
__device__ __forceinline__ void load_stage(WidePanel& panel, float* stage) {
#pragma unroll
  for (int c = 0; c < kWidePanelColumns; c += kWarpTile, stage += kPlane) {
    stage_rows<kStageRows, kVector>(panel.m + c, panel.cols, min(kWarpTile, panel.columns - c), panel.rows,
                                    stage);
  }
  stage_rows<kStageRows, kVector>(panel.p, panel.rank, panel.factors, panel.rows, stage);
  panel.m += int64_t{kStageRows} * panel.cols;
  panel.p += int64_t{kStageRows} * panel.rank;
  panel.rows -= kStageRows;
  end_copies();
}

// Adds the products of the warp's rows of a stage. Both halves of acc[] are 32 columns of M apart, both
// halves of acc[][] 16 columns of P.
__device__ __forceinline__ void multiply_stage(const float* stage, const TileLane& lane, float (&acc)[8][8]) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const float* m = stage + warp * kPitch + 4 * lane.quad;
  const float* p = stage + 2 * kPlane + warp * kPitch + 4 * lane.row;
#pragma unroll 1
  for (int row = 0; row < kStageRows; row += kWarps) {
    float left[8], right[8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 x = *reinterpret_cast<const float4*>(m + row * kPitch + half * kPlane);
      const float4 y = *reinterpret_cast<const float4*>(p + row * kPitch + 16 * half);
      left[4 * half] = x.x, left[4 * half + 1] = x.y, left[4 * half + 2] = x.z, left[4 * half + 3] = x.w;
      right[4 * half] = y.x, right[4 * half + 1] = y.y, right[4 * half + 2] = y.z, right[4 * half + 3] = y.w;
    }
#pragma unroll
    for (int e = 0; e < 64; ++e) acc[e / 8][e % 8] = fmaf(left[e / 8], right[e % 8], acc[e / 8][e % 8]);
  }
}

template <bool kVector>
__device__ __forceinline__ void back_project_wide_panel(WidePanel panel, float* q, int k0, float* shared) {
  const int steps = (panel.rows + kStageRows - 1) / kStageRows, thread = static_cast<int>(threadIdx.x);
  const TileLane lane;
  float acc[8][8] = {};
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    load_stage<kVector>(panel, shared + stage * kStageFloats);
  }
  int stage = 0, loaded = kStages - 1;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // the readers of the stage loaded next are done as well
    load_stage<kVector>(panel, shared + loaded * kStageFloats);
    multiply_stage(shared + stage * kStageFloats, lane, acc);
    stage = stage == kStages - 1 ? 0 : stage + 1;
    loaded = loaded == kStages - 1 ? 0 : loaded + 1;
  }
  wait_for_copies<0>();
  __syncthreads();
  float* const part = shared + thread / 32 * kWidePanelColumns * kWarpTile;
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    float* const row = part + (c / 4 * 32 + 4 * lane.quad + c % 4) * kWarpTile + 4 * lane.row;
    *reinterpret_cast<float4*>(row) = make_float4(acc[c][0], acc[c][1], acc[c][2], acc[c][3]);
    *reinterpret_cast<float4*>(row + 16) = make_float4(acc[c][4], acc[c][5], acc[c][6], acc[c][7]);
  }
  __syncthreads();
  const int k = thread % kWarpTile;
  for (int column = thread / kWarpTile; column < panel.columns && k < panel.factors; column += kWarps) {
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += shared[(w * kWidePanelColumns + column) * kWarpTile + k];
    float* const row = q + static_cast<int64_t>(column) * panel.rank;
    row[k0 + k] = panel.formed && !is_finite(row[0]) ? row[0] : sum;
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    back_project_wide_kernel(const __grid_constant__ BackProjectArgs a, int parts_of_rank) {
  wait_for_earlier_kernels();
  GW_DYNAMIC_SHARED(float, shared);
  __shared__ int found[1];
  const int block = static_cast<int>(blockIdx.x) / parts_of_rank;
  const int k0 = a.first + static_cast<int>(blockIdx.x) % parts_of_rank * kWarpTile;
  const int matrix = find_matrix(a.matrices, &MatrixBlocks::wide_panel, block, found);
  const MatrixDescriptor d = a.matrices.descriptors[matrix];
  if (k0 >= d.rank) return;
  const int column0 = (block - a.matrices.starts[matrix].wide_panel) * kWidePanelColumns;
  const WidePanel panel{.m = a.m + d.offset + column0,
                        .p = a.p + d.p_offset + k0,
                        .cols = d.cols,
                        .rank = d.rank,
                        .columns = min(kWidePanelColumns, d.cols - column0),
                        .factors = min(kWarpTile, d.rank - k0),
                        .rows = d.rows,
                        .formed = a.first > 0};
  float* const q = a.q + d.q_offset + static_cast<int64_t>(column0) * d.rank;
  if (flagged(a.flags, matrix)) {  // M was not finite
    const int k = static_cast<int>(threadIdx.x) % kWarpTile;
    for (int column = static_cast<int>(threadIdx.x) / kWarpTile; column < panel.columns; column += kWarps) {
      if (k < panel.factors) q[static_cast<int64_t>(column) * panel.rank + k0 + k] = 0.0f;
    }
  } else if (d.cols % 4 == 0 && d.rank % 4 == 0 && aligned16(panel.m) && aligned16(panel.p)) {
    back_project_wide_panel<true>(panel, q, k0, shared);
  } else {
    back_project_wide_panel<false>(panel, q, k0, shared);
  }
}

void launch_back_project_wide(CudaStream stream, const MatrixTable& table, const BackProjectArgs& a) {
  const int parts_of_rank = (table.max_rank() - a.first + kWarpTile - 1) / kWarpTile;
  launch("powersgd_back_project", back_project_wide_kernel,
         {.grid = dim3(static_cast<unsigned>(table.host_blocks().back().wide_panel * parts_of_rank)),
          .block = dim3(kThreads),
          .shared_bytes = size_t{kStages * kStageFloats} * sizeof(float),
          .stream = stream},
         a, parts_of_rank);
}

}  // namespace

void powersgd_back_project(CudaStream stream, const PowerSgdBackProject& op) {
  const BackProjectArgs a{
      .matrices = matrices_of(*op.table), .m = op.m, .p = op.p, .q = op.q, .flags = op.flags};
  op.table->max_rank() > kMaxNarrowRank ? launch_back_project_wide(stream, *op.table, a)
                                        : launch_back_project<false>(stream, *op.table, a);
}

void powersgd_project_onto(CudaStream stream, const PowerSgdProjectOnto& op) {
  if (op.residual == nullptr)
    return powersgd_back_project(stream, {.table = op.table, .m = op.grad, .p = op.p, .q = op.q});
  BackProjectArgs a{.matrices = matrices_of(*op.table),
                    .m = op.grad,
                    .residual = op.residual,
                    .pending = op.pending,
                    .p = op.p,
                    .q = op.q};
  launch_back_project<true>(stream, *op.table, a);
  if (op.table->max_rank() <= kMaxNarrowRank) return;
  a.m = op.residual, a.first = kMaxNarrowRank;
  launch_back_project_wide(stream, *op.table, a);
}

}  // namespace gradwire::cuda
