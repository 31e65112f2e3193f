// PowerSGD passes (b) and (d) on CUDA: Q = M^T P and residual = M - P Q^T, reading M from memory once; or M =
// grad + residual and Q = M^T P.
//
// Bytes per element: 8 with residual (panels up to about 2900 rows; up to 12 for taller ones, whose rest is
// read again, mostly from the L2 cache), 4 without; (d) 12. Limit: memory bandwidth up to about rank 8. A block
// takes a panel of whole columns, 8 to 32 of them, into shared memory. Each thread owns four columns and rows at a
// fixed stride; while the panel streams in it accumulates its part of Q in registers, up to 8 columns of P at
// a time (further ones from the held panel). Parts are summed over a warp's lanes, then over warps in order;
// then the panel, which is still there, gives the residual. No other block is involved, so there is nothing
// to zero or to wait for. Alignment: any; 16-byte accesses when a matrix's rows are 16-byte aligned.
#include "kernels/powersgd/powersgd.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;

struct BackProjectArgs {
  Matrices matrices;
  const float* grad;
  float* residual;
  const float* p;
  float* q;
  const int32_t* flags;
  bool forms_m;  // project_onto: the residual is not M yet
  int shared_floats;
};

// Columns k0 .. k0 + kRank of a row of P; zero beyond the rank.
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
  int column0, columns, width;  // width: what panel_columns() says; columns: as many as there are
  int held_rows;
  float *held, *parts, *q;  // shared: (held_rows, width), (kWarps, width * kRank), (rank, width)
};

// A matrix that was not finite: Q = 0, and the residual becomes the previous step's.
__device__ __forceinline__ void restore(const BackProjectArgs& a, const MatrixDescriptor& d,
                                        const Panel& panel) {
  for (int item = static_cast<int>(threadIdx.x); item < panel.columns * d.rank; item += kThreads) {
    a.q[d.q_offset + static_cast<int64_t>(panel.column0) * d.rank + item] = 0.0f;
  }
  if (a.residual == nullptr) return;
  int column = static_cast<int>(threadIdx.x) % panel.width;
  if (column >= panel.columns) return;
  for (int row = static_cast<int>(threadIdx.x) / panel.width; row < d.rows; row += kThreads / panel.width) {
    int64_t at = d.offset + static_cast<int64_t>(row) * d.cols + panel.column0 + column;
    if (!is_finite(a.grad[at])) continue;  // holds the old residual already
    float old = a.residual[at] - a.grad[at];
    a.residual[at] = is_finite(old) ? old : 0.0f;
  }
}

// Sums acc over the block and writes columns [k0, k0 + kRank) of the panel's Q, to shared and global memory.
template <int kRank, bool kVector>
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
  __syncthreads();  // readers of `parts` and writers of `held` are done
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
  if (item < panel.width * kRank && k < d.rank) {
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += panel.parts[w * panel.width * kRank + item];
    panel.q[k * panel.width + column] = sum;
    if (column < panel.columns) {
      a.q[d.q_offset + static_cast<int64_t>(panel.column0 + column) * d.rank + k] = sum;
    }
  }
}

// M = grad + residual of one row's four columns, stored into the residual.
template <bool kVector>
__device__ __forceinline__ void form_m(const float* grad, float* residual, const Quad<kVector>& quad,
                                       int limit, float (&m)[4]) {
  float e[4], keep[4];
  quad.load(grad, limit, m);
  quad.load(residual, limit, e);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    float sum = m[c] + e[c];
    // Where the gradient is not finite the old residual stays; where only the sum is not, it is clamped.
    keep[c] = is_finite(m[c]) ? fminf(fmaxf(sum, -FLT_MAX), FLT_MAX) : e[c];
    m[c] = sum;
  }
  quad.store(residual, limit, keep);
}

template <int kRank, bool kVector>
__device__ __forceinline__ void back_project_panel(const BackProjectArgs& a, const MatrixDescriptor& d,
                                                   const Panel& panel) {
  constexpr int kBatch = kRank > 4 ? 2 : 4;  // rows that a thread loads at once; more would spill
  Quad<kVector> quad{panel.width / 4, static_cast<int>(threadIdx.x) % (panel.width / 4)};
  int row_of_thread = static_cast<int>(threadIdx.x) / quad.spread, row_step = kThreads / quad.spread;
  float* m_global =
      (a.residual != nullptr ? a.residual : const_cast<float*>(a.grad)) + d.offset + panel.column0;
  const float* p = a.p + d.p_offset;
  bool p_vector = d.rank % 4 == 0 && aligned16(p);

  auto load_m = [&](int row, float(&m)[4]) {
    if (row < panel.held_rows) {
      quad.load(panel.held + row * panel.width, row < d.rows ? panel.width : 0, m);
    } else {
      quad.load(m_global + static_cast<int64_t>(row) * d.cols, row < d.rows ? panel.columns : 0, m);
    }
  };
  auto load_weights = [&](int row, int k0, float(&weights)[kRank]) {
    load_p<kRank>(p + static_cast<int64_t>(row) * d.rank, k0, row < d.rows ? d.rank : 0, p_vector, weights);
  };

  for (int k0 = 0; k0 < d.rank; k0 += kRank) {
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
        const int64_t at = static_cast<int64_t>(row) * d.cols;
        const int limit = row < d.rows ? panel.columns : 0;
        if (k0 > 0) {
          load_m(row, m[b]);
        } else if (a.forms_m) {
          form_m(a.grad + d.offset + panel.column0 + at, m_global + at, quad, limit, m[b]);
        } else {
          quad.load(m_global + at, limit, m[b]);
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) load_weights(row0 + b * row_step, k0, weights[b]);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        int row = row0 + b * row_step;
        if (k0 == 0 && row < min(panel.held_rows, d.rows)) {
          quad.store(panel.held + row * panel.width, panel.width, m[b]);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
#pragma unroll
          for (int k = 0; k < kRank; ++k) acc[c][k] = fmaf(m[b][c], weights[b][k], acc[c][k]);
        }
      }
    }
    combine<kRank, kVector>(a, d, panel, quad, k0, acc);
  }
  if (a.residual == nullptr || a.forms_m) return;

  __syncthreads();  // Q is complete
#pragma unroll 1
  for (int row0 = row_of_thread; row0 < d.rows; row0 += kBatch * row_step) {
    float left[kBatch][4];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) load_m(row0 + b * row_step, left[b]);
#pragma unroll 1
    for (int k0 = 0; k0 < d.rank; k0 += kRank) {
      float weights[kBatch][kRank];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) load_weights(row0 + b * row_step, k0, weights[b]);
#pragma unroll
      for (int k = 0; k < kRank; ++k) {
        float q[4];
        quad.load(panel.q + (k0 + k) * panel.width, k0 + k < d.rank ? panel.width : 0, q);
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
#pragma unroll
          for (int c = 0; c < 4; ++c) left[b][c] = fmaf(-weights[b][k], q[c], left[b][c]);
        }
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      int row = row0 + b * row_step;
#pragma unroll
      for (int c = 0; c < 4; ++c) left[b][c] = is_finite(left[b][c]) ? left[b][c] : 0.0f;
      quad.store(m_global + static_cast<int64_t>(row) * d.cols, row < d.rows ? panel.columns : 0, left[b]);
    }
  }
}

template <int kRank>
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
  panel.q = panel.parts + kWarps * panel.width * kRank;
  panel.held = panel.q + d.rank * panel.width;
  panel.held_rows = (a.shared_floats - static_cast<int>(panel.held - shared)) / panel.width;
  if (a.flags != nullptr && a.flags[matrix] != 0) {
    restore(a, d, panel);
    return;
  }
  const float* m = (a.residual != nullptr ? a.residual : a.grad) + d.offset;
  if (d.cols % 4 == 0 && aligned16(m) && (!a.forms_m || aligned16(a.grad + d.offset))) {
    back_project_panel<kRank, true>(a, d, panel);
  } else {
    back_project_panel<kRank, false>(a, d, panel);
  }
}

template <int kRank>
void launch_back_project(CudaStream stream, const MatrixTable& table, BackProjectArgs a) {
  // As much shared memory as some panel can use; smaller tables leave room for more blocks at once.
  int64_t most = 0;
  for (const auto& d : table.host()) {
    int64_t width = panel_columns(d.rows);
    int64_t held = (a.residual != nullptr && !a.forms_m) || d.rank > kRank ? d.rows : 0;
    most = std::max(most, (held + d.rank + kWarps * kRank) * width);
  }
  a.shared_floats = static_cast<int>(std::min<int64_t>(most, kPanelSharedBytes / sizeof(float)));
  launch("powersgd_back_project", back_project_kernel<kRank>,
         {.grid = dim3(static_cast<unsigned>(table.total_blocks().panel)),
          .block = dim3(kThreads),
          .shared_bytes = static_cast<size_t>(a.shared_floats) * sizeof(float),
          .stream = stream},
         a);
}

void launch_for_rank(CudaStream stream, const MatrixTable& table, const BackProjectArgs& a) {
  int rank = table.max_rank();
  if (rank <= 1) {
    launch_back_project<1>(stream, table, a);
  } else if (rank <= 2) {
    launch_back_project<2>(stream, table, a);
  } else if (rank <= 4) {
    launch_back_project<4>(stream, table, a);
  } else {
    launch_back_project<8>(stream, table, a);
  }
}

}  // namespace

void powersgd_back_project(CudaStream stream, const PowerSgdBackProject& op) {
  launch_for_rank(stream, *op.table,
                  {.matrices = matrices_of(*op.table),
                   .grad = op.grad,
                   .residual = op.residual,
                   .p = op.p,
                   .q = op.q,
                   .flags = op.flags,
                   .forms_m = false,
                   .shared_floats = 0});
}

void powersgd_project_onto(CudaStream stream, const PowerSgdProjectOnto& op) {
  launch_for_rank(stream, *op.table,
                  {.matrices = matrices_of(*op.table),
                   .grad = op.grad,
                   .residual = op.residual,
                   .p = op.p,
                   .q = op.q,
                   .flags = nullptr,
                   .forms_m = op.residual != nullptr,
                   .shared_floats = 0});
}

}  // namespace gradwire::cuda
