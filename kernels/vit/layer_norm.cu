// layer_norm and layer_norm_backward.
//
// Rows of up to 1024 elements (a multiple of 4, or of 8 with BF16 operands, aligned) are held in the
// registers of a group of lanes: forward moves 8 B (FP32) or 6 B (BF16) per element, or 16 or 12 B with a
// residual branch. Backward moves 12 or 10 B, plus 4 B when accumulating into dx and 2 B for a rounded copy
// of dx, in 16-byte accesses. The backward kernel computes d_gamma, d_beta and the sum of dx in the same
// pass. A block owns a chunk of rows (kernels/math/column_chunks.h); its groups keep per-column sums in
// registers, add them in group order and write one partial row. A second kernel adds the partial rows in
// order. Other rows are processed by one block each, with 4-byte accesses, and the parameter gradients read x
// and dy a second time. Limit: memory bandwidth. Deterministic: no atomics.
#include "kernels/cuda/vector.cuh"
#include "kernels/vit/elementwise.h"
#include "kernels/vit/layer_norm.h"

namespace gradwire::cuda {
namespace {

// Adds branch + branch_bias to x, and also stores the result in `sum`.
template <int G, int Items, int V, typename S>
__device__ __forceinline__ void join_branch(const LayerNorm<S>& a, int64_t row, int width,
                                            RowSlice<G, Items, V>& x) {
  using Slice = RowSlice<G, Items, V>;
#pragma unroll
  for (int j = 0; j < Items; ++j) {
    const int c = Slice::column(j);
    if (c >= width) continue;
    float branch[V], bias[V];
    load<V>(a.branch + row * a.x_stride + c, branch);
    load<V>(a.branch_bias + c, bias);
#pragma unroll
    for (int k = 0; k < V; ++k) x.v[j][k] += branch[k] + bias[k];
    store<V>(a.sum + row * a.x_stride + c, x.v[j]);
  }
}

template <int G, int Items, typename S>
__global__ void __launch_bounds__(kRowThreads) layer_norm_slice_kernel(LayerNorm<S> a) {
  constexpr int V = kVector<S>;
  using Slice = RowSlice<G, Items, V>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * Slice::kRowsPerBlock + Slice::group();
  const bool live = row < a.rows;
  const int width = static_cast<int>(a.width);
  const float inverse_width = 1.0f / static_cast<float>(width);
  Slice x;
  x.read(a.x + row * a.x_stride, width, live);
  if (a.branch != nullptr && live) join_branch(a, row, width, x);
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < Items; ++j) {
#pragma unroll
    for (int k = 0; k < V; k += 4) sum += (x.v[j][k] + x.v[j][k + 1]) + (x.v[j][k + 2] + x.v[j][k + 3]);
  }
  const float mean = group_reduce<G>(sum, Sum()) * inverse_width;
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < Items; ++j) {
    if (Slice::column(j) >= width) continue;
#pragma unroll
    for (int k = 0; k < V; ++k) {
      x.v[j][k] -= mean;
      squares += x.v[j][k] * x.v[j][k];
    }
  }
  const float rstd = 1.0f / sqrtf(group_reduce<G>(squares, Sum()) * inverse_width + a.eps);
  if (!live) return;
#pragma unroll
  for (int j = 0; j < Items; ++j) {
    const int c = Slice::column(j);
    if (c >= width) continue;
    float gamma[V], beta[V];
    load<V>(a.gamma + c, gamma);
    load<V>(a.beta + c, beta);
#pragma unroll
    for (int k = 0; k < V; ++k) x.v[j][k] = x.v[j][k] * rstd * gamma[k] + beta[k];
  }
  x.write(a.y + row * a.width, width, true);
  if (Slice::lane() == 0) {
    a.mean[row] = mean;
    a.rstd[row] = rstd;
  }
}

// Adds the sums of the block's groups in order, in shared memory (3, kWidth), and writes the totals to
// partial(3, width).
template <typename Slice, int kItems, int kV>
__device__ __forceinline__ void store_partial_sums(float (&d_gamma)[kItems][kV], float (&d_beta)[kItems][kV],
                                                   float (&dx_sum)[kItems][kV], float* shared, int width,
                                                   float* partial) {
  constexpr int kWidth = Slice::kWidth;
  for (int turn = 0; turn < Slice::kRowsPerBlock; ++turn) {
    if (Slice::group() == turn) {
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        float* at = shared + Slice::column(j);
        if (turn > 0) {
          float before[kV];
          load<kV>(at, before);
          add<kV>(before, d_gamma[j]);
          load<kV>(at + kWidth, before);
          add<kV>(before, d_beta[j]);
          load<kV>(at + 2 * kWidth, before);
          add<kV>(before, dx_sum[j]);
        }
        store<kV>(at, d_gamma[j]);
        store<kV>(at + kWidth, d_beta[j]);
        store<kV>(at + 2 * kWidth, dx_sum[j]);
      }
    }
    __syncthreads();
  }
  for (int c = static_cast<int>(threadIdx.x); c < width; c += kRowThreads) {
    partial[c] = shared[c];
    partial[width + c] = shared[kWidth + c];
    partial[2 * width + c] = shared[2 * kWidth + c];
  }
}

// Processes one chunk of rows per block. Writes (d_gamma, d_beta, dx_sum) of the chunk to workspace(chunk, 3,
// width).
template <int G, int Items, typename S>
__global__ void __launch_bounds__(kRowThreads)
    layer_norm_backward_slice_kernel(LayerNormBackward<S> a, int64_t rows_per_chunk) {
  constexpr int V = kVector<S>;
  using Slice = RowSlice<G, Items, V>;
  constexpr int kWidth = Slice::kWidth;
  __shared__ __align__(16) float shared[3 * kWidth];
  const int width = static_cast<int>(a.width);
  const float inverse_width = 1.0f / static_cast<float>(width);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * rows_per_chunk;
  const int64_t end = begin + rows_per_chunk < a.rows ? begin + rows_per_chunk : a.rows;
  float d_gamma[Items][V] = {}, d_beta[Items][V] = {}, dx_sum[Items][V] = {};
  for (int64_t first = begin; first < end; first += Slice::kRowsPerBlock) {
    const int64_t row = first + Slice::group();
    const bool live = row < end;
    const float mean = live ? a.mean[row] : 0.0f, rstd = live ? a.rstd[row] : 0.0f;
    Slice x, g;
    x.read(a.x + row * a.x_stride, width, live);
    g.read(a.dy + row * a.width, width, live);
    float sum = 0.0f, sum_normalized = 0.0f;
#pragma unroll
    for (int j = 0; j < Items; ++j) {
      const int c = Slice::column(j);
      if (c >= width) continue;
      float gamma[V];
      load<V>(a.gamma + c, gamma);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        x.v[j][k] = (x.v[j][k] - mean) * rstd;
        d_gamma[j][k] += g.v[j][k] * x.v[j][k];
        d_beta[j][k] += g.v[j][k];
        g.v[j][k] *= gamma[k];
        sum += g.v[j][k];
        sum_normalized += g.v[j][k] * x.v[j][k];
      }
    }
    sum = group_reduce<G>(sum, Sum()) * inverse_width;
    sum_normalized = group_reduce<G>(sum_normalized, Sum()) * inverse_width;
    if (!live) continue;
    float* dx = a.dx + row * a.x_stride;
#pragma unroll
    for (int j = 0; j < Items; ++j) {
      const int c = Slice::column(j);
      if (c >= width) continue;
      float out[V] = {};
      if (a.accumulate_dx) load<V>(dx + c, out);
#pragma unroll
      for (int k = 0; k < V; ++k) out[k] += rstd * (g.v[j][k] - sum - x.v[j][k] * sum_normalized);
      store<V>(dx + c, out);
      add<V>(out, dx_sum[j]);
      if (a.dx_rounded != nullptr) store<V>(a.dx_rounded + row * a.x_stride + c, out);
    }
  }
  store_partial_sums<Slice>(d_gamma, d_beta, dx_sum, shared, width,
                            a.workspace + static_cast<int64_t>(blockIdx.x) * 3 * width);
}

template <typename S>
__global__ void __launch_bounds__(kRowThreads) layer_norm_kernel(LayerNorm<S> a) {
  __shared__ float shared[32];
  const int64_t row = blockIdx.x;
  const float* x = a.x + row * a.x_stride;
  const float inverse_width = 1.0f / static_cast<float>(a.width);
  if (a.branch != nullptr) {
    // A thread reads back only elements that the same thread wrote.
    const S* branch = a.branch + row * a.x_stride;
    float* joined = a.sum + row * a.x_stride;
    for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x)
      joined[c] = x[c] + (widen(branch[c]) + a.branch_bias[c]);
    x = joined;
  }
  float sum = 0.0f;
  for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x) sum += x[c];
  const float mean = block_reduce(sum, shared, Sum()) * inverse_width;
  float squares = 0.0f;
  for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x) squares += (x[c] - mean) * (x[c] - mean);
  const float rstd = 1.0f / sqrtf(block_reduce(squares, shared, Sum()) * inverse_width + a.eps);
  for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x) {
    a.y[row * a.width + c] = narrow<S>((x[c] - mean) * rstd * a.gamma[c] + a.beta[c]);
  }
  if (threadIdx.x == 0) {
    a.mean[row] = mean;
    a.rstd[row] = rstd;
  }
}

template <typename S>
__global__ void __launch_bounds__(kRowThreads) layer_norm_backward_kernel(LayerNormBackward<S> a) {
  __shared__ float shared[32];
  const int64_t row = blockIdx.x;
  const float* x = a.x + row * a.x_stride;
  const S* dy = a.dy + row * a.width;
  float* dx = a.dx + row * a.x_stride;
  const float inverse_width = 1.0f / static_cast<float>(a.width), mean = a.mean[row], rstd = a.rstd[row];
  float sum = 0.0f, sum_normalized = 0.0f;
  for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x) {
    const float g = widen(dy[c]) * a.gamma[c];
    sum += g;
    sum_normalized += g * ((x[c] - mean) * rstd);
  }
  sum = block_reduce(sum, shared, Sum()) * inverse_width;
  sum_normalized = block_reduce(sum_normalized, shared, Sum()) * inverse_width;
  for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x) {
    const float d = rstd * (widen(dy[c]) * a.gamma[c] - sum - (x[c] - mean) * rstd * sum_normalized);
    const float out = a.accumulate_dx ? dx[c] + d : d;
    dx[c] = out;
    if (a.dx_rounded != nullptr) a.dx_rounded[row * a.x_stride + c] = narrow<S>(out);
  }
}

// Computes the parameter gradients of one chunk of rows (blockIdx.y), a thread per column.
template <typename S>
__global__ void __launch_bounds__(kRowThreads)
    layer_norm_parameters_kernel(LayerNormBackward<S> a, int64_t rows_per_chunk) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (c >= a.width) return;
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * rows_per_chunk;
  const int64_t end = begin + rows_per_chunk < a.rows ? begin + rows_per_chunk : a.rows;
  float d_gamma = 0.0f, d_beta = 0.0f;
  for (int64_t row = begin; row < end; ++row) {
    const float dy = widen(a.dy[row * a.width + c]);
    d_gamma += dy * ((a.x[row * a.x_stride + c] - a.mean[row]) * a.rstd[row]);
    d_beta += dy;
  }
  float* partial = a.workspace + static_cast<int64_t>(blockIdx.y) * 3 * a.width;
  partial[c] = d_gamma;
  partial[a.width + c] = d_beta;
}

struct LoadDx {
  const float* dx;
  int64_t stride;
  template <int W>
  __device__ __forceinline__ void at(int64_t row, int64_t c, float (&out)[W]) const {
    load<W>(dx + row * stride + c, out);
  }
};

template <template <typename> typename Args, typename S, typename... Pointers>
bool sliceable(const Args<S>& a, Pointers... pointers) {
  return a.width <= kLongestSlicedRow && a.x_stride % kVector<S> == 0 &&
         takes_vectors<S>(a.width, pointers...);
}

}  // namespace

template <typename S>
void layer_norm(CudaStream stream, const LayerNorm<S>& args) {
  LayerNorm<S> a = args;
  if (a.x_stride == 0) a.x_stride = a.width;
  if (a.rows <= 0 || a.width <= 0) return;
  if (sliceable(a, a.x, a.gamma, a.beta, a.y, a.branch, a.branch_bias, a.sum)) {
    with_row_slice<kVector<S>>(a.width, [&]<int G, int Items>() {
      launch("layer_norm", layer_norm_slice_kernel<G, Items, S>, row_slice_launch<G>(stream, a.rows), a);
    });
  } else {
    launch("layer_norm", layer_norm_kernel<S>, row_launch(stream, a.rows, a.width), a);
  }
}

template <typename S>
void layer_norm_backward(CudaStream stream, const LayerNormBackward<S>& args) {
  LayerNormBackward<S> a = args;
  if (a.x_stride == 0) a.x_stride = a.width;
  if (a.width <= 0) return;
  const auto chunks = column_chunks(a.rows);
  const auto count = static_cast<unsigned>(chunks.count);
  if (sliceable(a, a.x, a.dy, a.gamma, a.dx, a.dx_rounded)) {
    with_row_slice<kVector<S>>(a.width, [&]<int G, int Items>() {
      launch("layer_norm_backward", layer_norm_backward_slice_kernel<G, Items, S>,
             {.grid = dim3(count), .block = dim3(kRowThreads), .stream = stream}, a, chunks.rows);
    });
  } else {
    const auto across = static_cast<unsigned>((a.width + kRowThreads - 1) / kRowThreads);
    // Compute the parameter gradients first, because dx may replace dy or x.
    launch("layer_norm_parameters", layer_norm_parameters_kernel<S>,
           {.grid = dim3(across, count), .block = dim3(kRowThreads), .stream = stream}, a, chunks.rows);
    launch("layer_norm_backward", layer_norm_backward_kernel<S>, row_launch(stream, a.rows, a.width), a);
    if (a.dx_sum != nullptr) {
      const bool vectors = a.x_stride % 4 == 0 && takes_vectors<float>(a.width, a.dx, a.workspace);
      partial_sums_over_rows<float>("layer_norm_dx_sum", stream, vectors, LoadDx{a.dx, a.x_stride}, a.rows,
                                    a.width, a.workspace + 2 * a.width, 3 * a.width);
    }
  }
  if (!a.partial_only) combine_sums(stream, {{a.sums()}});
}

GW_INSTANTIATE_CUDA_OP(layer_norm, LayerNorm)
GW_INSTANTIATE_CUDA_OP(layer_norm_backward, LayerNormBackward)

}  // namespace gradwire::cuda
