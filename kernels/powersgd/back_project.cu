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
  } else {
    launch_back_project<8, kForms>(stream, table, a);
  }
}

}  // namespace

void powersgd_back_project(CudaStream stream, const PowerSgdBackProject& op) {
  launch_for_rank<false>(
      stream, *op.table,
      {.matrices = matrices_of(*op.table), .m = op.m, .p = op.p, .q = op.q, .flags = op.flags});
}

void powersgd_project_onto(CudaStream stream, const PowerSgdProjectOnto& op) {
  const BackProjectArgs a{.matrices = matrices_of(*op.table),
                          .m = op.grad,
                          .residual = op.residual,
                          .pending = op.pending,
                          .p = op.p,
                          .q = op.q};
  op.residual != nullptr ? launch_for_rank<true>(stream, *op.table, a)
                         : launch_for_rank<false>(stream, *op.table, a);
}

}  // namespace gradwire::cuda
