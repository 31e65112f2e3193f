// PowerSGD passes (b) and (d) on CUDA: Q = M^T P; or E = residual + pending, M = grad + E, stored into
// residual, and Q = M^T P.
//
// Bytes per element: 4 B in pass (b), 12 B in pass (d). Limit: memory bandwidth up to about rank 8; beyond, M
// is read again for every eight columns of P, mostly from the L2 cache. A block takes a panel of 16 or 32
// whole columns. Each thread owns four columns, and rows at a fixed stride; as the panel streams in, the
// thread accumulates its part of Q in registers. Parts are summed over a warp's lanes, then over warps in
// order. Blocks are independent of each other. Alignment: any; 16-byte accesses when a matrix's rows are
// 16-byte aligned.
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
};

// Loads columns [k0, k0 + kRank) of a row of P; columns beyond the rank are zero.
template <int kRank>
__device__ __forceinline__ void load_p(const float* row, int k0, int rank, bool vector, float (&p)[kRank]) {
  if (kRank % 4 == 0 && vector) {
#pragma unroll
    for (int k = 0; k < kRank; k += 4) {
      float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (k0 + k < rank) v = *reinterpret_cast<const float4*>(row + k0 + k);
      p[k] = v.x, p[k + 1] = v.y, p[k + 2] = v.z, p[k + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int k = 0; k < kRank; ++k) p[k] = k0 + k < rank ? row[k0 + k] : 0.0f;
  }
}

struct Panel {
  int column0, columns, width;  // width: panel_columns(); columns: the panel's columns within the matrix
  float* parts;                 // shared memory: (kWarps, width * kRank)
};

// Sums acc over the block and writes columns [k0, k0 + kRank) of the panel's Q.
template <int kRank, bool kForms, bool kVector>
__device__ __forceinline__ void combine(const BackProjectArgs& a, const MatrixDescriptor& d,
                                        const Panel& panel, const Quad<kVector>& quad, int k0,
                                        float (&acc)[4][kRank]) {
  int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int offset = 16; offset >= quad.spread; offset /= 2) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int k = 0; k < kRank; ++k) acc[c][k] += __shfl_xor_sync(kAllLanes, acc[c][k], offset);
    }
  }
  __syncthreads();  // readers of `parts` are done
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
  int item = static_cast<int>(threadIdx.x), column = item / kRank, k = k0 + item % kRank;
  if (column < panel.columns && k < d.rank) {
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += panel.parts[w * panel.width * kRank + item];
    float* row = a.q + d.q_offset + static_cast<int64_t>(panel.column0 + column) * d.rank;
    // The pass over the first columns detected non-finite M. Later passes read M back from the residual,
    // which is always finite.
    if (kForms && k0 > 0 && !is_finite(row[0])) sum = row[0];
    row[k] = sum;
  }
}

// Forms M for the four columns of kBatch rows, which start at row0 and are row_step rows apart. `m` holds the
// gradient.
template <int kBatch, bool kVector>
__device__ __forceinline__ void form_m(const BackProjectArgs& a, const MatrixDescriptor& d, bool pending,
                                       const Panel& panel, const Quad<kVector>& quad, int row0, int row_step,
                                       float (&m)[kBatch][4]) {
  float e[kBatch][4];
  float* residual = a.residual + d.offset + panel.column0;
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    const int row = row0 + b * row_step;
    quad.load(residual + static_cast<int64_t>(row) * d.cols, row < d.rows ? panel.columns : 0, e[b]);
  }
  if (pending) {
    const float* q = a.pending.q + d.q_offset + static_cast<int64_t>(panel.column0) * d.rank;
#pragma unroll 1
    for (int k = 0; k < d.rank; ++k) {
      float weights[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int column = quad.column(c);
        weights[c] = column < panel.columns ? q[static_cast<int64_t>(column) * d.rank + k] : 0.0f;
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int row = row0 + b * row_step;
        const float p =
            row < d.rows ? a.pending.p[d.p_offset + static_cast<int64_t>(row) * d.rank + k] : 0.0f;
#pragma unroll
        for (int c = 0; c < 4; ++c) e[b][c] = fmaf(p, weights[c], e[b][c]);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
#pragma unroll
      for (int c = 0; c < 4; ++c) e[b][c] = is_finite(e[b][c]) ? e[b][c] : 0.0f;
    }
  }
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    const int row = row0 + b * row_step;
    float keep[4];
    add_gradient(m[b], e[b], keep);
#pragma unroll
    for (int c = 0; c < 4; ++c) m[b][c] = e[b][c];
    quad.store(residual + static_cast<int64_t>(row) * d.cols, row < d.rows ? panel.columns : 0, keep);
  }
}

template <int kRank, bool kForms, bool kVector>
__device__ __forceinline__ void back_project_panel(const BackProjectArgs& a, const MatrixDescriptor& d,
                                                   bool pending, const Panel& panel) {
  // Rows per thread and load; more rows would spill registers.
  constexpr int kBatch = kForms || kRank > 4 ? 2 : 4;
  Quad<kVector> quad{panel.width / 4, static_cast<int>(threadIdx.x) % (panel.width / 4)};
  int row_of_thread = static_cast<int>(threadIdx.x) / quad.spread, row_step = kThreads / quad.spread;
  const float* p = a.p + d.p_offset;
  bool p_vector = d.rank % 4 == 0 && aligned16(p);

  for (int k0 = 0; k0 < d.rank; k0 += kRank) {
    const float* from = (kForms && k0 > 0 ? a.residual : a.m) + d.offset + panel.column0;
    float acc[4][kRank];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int k = 0; k < kRank; ++k) acc[c][k] = 0.0f;
    }
#pragma unroll 1
    for (int row0 = row_of_thread; row0 < d.rows; row0 += kBatch * row_step) {
      float m[kBatch][4], weights[kBatch][kRank];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        int row = row0 + b * row_step;
        quad.load(from + static_cast<int64_t>(row) * d.cols, row < d.rows ? panel.columns : 0, m[b]);
      }
      if constexpr (kForms) {
        if (k0 == 0) form_m<kBatch, kVector>(a, d, pending, panel, quad, row0, row_step, m);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        int row = row0 + b * row_step;
        load_p<kRank>(p + static_cast<int64_t>(row) * d.rank, k0, row < d.rows ? d.rank : 0, p_vector,
                      weights[b]);
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
    combine<kRank, kForms, kVector>(a, d, panel, quad, k0, acc);
  }
}

template <int kRank, bool kForms>
__global__ void __launch_bounds__(kThreads, 2)
    back_project_kernel(const __grid_constant__ BackProjectArgs a) {
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
  if (a.flags != nullptr && a.flags[matrix] != 0) {  // M was not finite
    for (int item = static_cast<int>(threadIdx.x); item < panel.columns * d.rank; item += kThreads) {
      a.q[d.q_offset + static_cast<int64_t>(panel.column0) * d.rank + item] = 0.0f;
    }
    return;
  }
  const bool pending = is_pending(a.pending, matrix);
  if (d.cols % 4 == 0 && aligned16(a.m + d.offset) && (!kForms || aligned16(a.residual + d.offset))) {
    back_project_panel<kRank, kForms, true>(a, d, pending, panel);
  } else {
    back_project_panel<kRank, kForms, false>(a, d, pending, panel);
  }
}

template <int kRank, bool kForms>
void launch_back_project(CudaStream stream, const MatrixTable& table, const BackProjectArgs& a) {
  launch(kForms ? "powersgd_project_onto" : "powersgd_back_project", back_project_kernel<kRank, kForms>,
         {.grid = dim3(static_cast<unsigned>(table.host_blocks().back().panel)),
          .block = dim3(kThreads),
          .shared_bytes = size_t{kWarps * kMaxPanelColumns * kRank} * sizeof(float),
          .stream = stream},
         a);
}

template <bool kForms>
void launch_for_rank(CudaStream stream, const MatrixTable& table, const BackProjectArgs& a) {
  int rank = table.max_rank();
  if (rank <= 1) {
    launch_back_project<1, kForms>(stream, table, a);
  } else if (rank <= 2) {
    launch_back_project<2, kForms>(stream, table, a);
  } else if (rank <= 4) {
    launch_back_project<4, kForms>(stream, table, a);
  } else if constexpr (kForms) {
    launch_back_project<8, kForms>(stream, table, a);
  }
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
__device__ __forceinline__ void back_project_wide_panel(WidePanel panel, float* q, float* shared) {
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
    q[static_cast<int64_t>(column) * panel.rank + k] = sum;
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    back_project_wide_kernel(const __grid_constant__ BackProjectArgs a, int parts_of_rank) {
  GW_DYNAMIC_SHARED(float, shared);
  __shared__ int found[1];
  const int block = static_cast<int>(blockIdx.x) / parts_of_rank;
  const int k0 = static_cast<int>(blockIdx.x) % parts_of_rank * kWarpTile;
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
                        .rows = d.rows};
  float* const q = a.q + d.q_offset + static_cast<int64_t>(column0) * d.rank + k0;
  if (a.flags != nullptr && a.flags[matrix] != 0) {  // M was not finite
    const int k = static_cast<int>(threadIdx.x) % kWarpTile;
    for (int column = static_cast<int>(threadIdx.x) / kWarpTile; column < panel.columns; column += kWarps) {
      if (k < panel.factors) q[static_cast<int64_t>(column) * panel.rank + k] = 0.0f;
    }
  } else if (d.cols % 4 == 0 && d.rank % 4 == 0 && aligned16(panel.m) && aligned16(panel.p)) {
    back_project_wide_panel<true>(panel, q, shared);
  } else {
    back_project_wide_panel<false>(panel, q, shared);
  }
}

void launch_back_project_wide(CudaStream stream, const MatrixTable& table, const BackProjectArgs& a) {
  const int parts_of_rank = (table.max_rank() + kWarpTile - 1) / kWarpTile;
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
                                        : launch_for_rank<false>(stream, *op.table, a);
}

void powersgd_project_onto(CudaStream stream, const PowerSgdProjectOnto& op) {
  const BackProjectArgs a{.matrices = matrices_of(*op.table),
                          .m = op.grad,
                          .residual = op.residual,
                          .pending = op.pending,
                          .p = op.p,
                          .q = op.q};
  if (op.residual != nullptr) {
    launch_for_rank<true>(stream, *op.table, a);
  } else {
    powersgd_back_project(stream, {.table = op.table, .m = op.grad, .p = op.p, .q = op.q});
  }
}

}  // namespace gradwire::cuda
