// layer_norm and layer_norm_backward.
//
// Rows of up to 1024 elements (a multiple of 4, or of 8 with BF16 operands, aligned) are read once: forward
// holds them in the registers of a group of lanes and moves 8 B (FP32) or 6 B (BF16) per element, or 16 or 12
// B with a residual branch. Backward holds them in shared memory and moves 12 or 10 B, plus 4 B when
// accumulating into dx and 2 B for a rounded copy of dx, in 16-byte accesses. It computes d_gamma, d_beta and
// the sum of dx in the same pass. A block owns a chunk of rows (kernels/math/column_chunks.h); its threads
// keep per-column sums in registers and write one partial row. A second kernel adds the partial rows in
// order. Other rows are processed by one block each, with 4-byte accesses, and the parameter gradients read x
// and dy a second time. Limit: memory bandwidth. Deterministic: no atomics.
#include <algorithm>

#include "kernels/cuda/copies.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/math/gelu.h"
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
__global__ void __launch_bounds__(kSliceThreads) layer_norm_slice_kernel(LayerNorm<S> a) {
  constexpr int V = kVector<S>;
  using Slice = RowSlice<G, Items, V>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * Slice::kRowsPerBlock + Slice::group();
  const bool live = row < a.rows;
  const int width = static_cast<int>(a.width);
  const float inverse_width = 1.0f / static_cast<float>(width);
  Slice x, gamma, beta;
  x.read(a.x + row * a.x_stride, width, live);
  gamma.read(a.gamma, width, live);  // before the sums, which would delay the loads
  beta.read(a.beta, width, live);
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
#pragma unroll
    for (int k = 0; k < V; ++k) x.v[j][k] = x.v[j][k] * rstd * gamma.v[j][k] + beta.v[j][k];
  }
  x.write(a.y + row * a.width, width, true);
  if (Slice::lane() == 0) {
    a.mean[row] = mean;
    a.rstd[row] = rstd;
  }
}

// The rows of a block of layer_norm_backward_slice_kernel, in two stages of up to eight rows: while one is
// processed, the other arrives. A warp takes the means of a row, a thread four columns of all rows; where
// rows are short, groups of threads share the rows.
template <typename S>
class BackwardRows {
 public:
  static constexpr int kRows = kRowThreads / 32;  // most rows of a stage

  // Returns the shared memory for stages of `rows` rows. The sums of all groups take its place at the end.
  static size_t shared_bytes(int64_t width, int rows) {
    const auto stages = static_cast<size_t>(width) * 2 * static_cast<size_t>(rows) * (8 + sizeof(S));
    return std::max<size_t>(stages, kRowThreads * 12 * sizeof(float)) + sizeof(Means) * 2 * kRows;
  }

  __device__ __forceinline__ BackwardRows(const LayerNormBackward<S>& args, int rows, int64_t end,
                                          unsigned char* memory)
      : a_(args),
        width_(static_cast<int>(args.width)),
        inverse_width_(reciprocal(static_cast<float>(width_))),
        rows_(rows),
        end_(end),
        means_(reinterpret_cast<Means*>(memory)),
        memory_(reinterpret_cast<float*>(means_ + 2 * kRows)),
        column_(static_cast<int>(threadIdx.x) % (width_ / 4) * 4),
        group_(static_cast<int>(threadIdx.x) / (width_ / 4)),
        groups_(kRowThreads / (width_ / 4)) {
    load<4>(a_.gamma + column_, gamma_);
  }

  // Begins to copy the rows from `first` on: each warp the row that it reduces.
  __device__ __forceinline__ void begin(int stage, int64_t first) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t row = first + warp;
    if (warp < rows_ && row < end_) {
      Means& means = means_[stage * kRows + warp];
      if (lane == 0) copy_async<4>(&means.mean, a_.mean + row, true);
      if (lane == 1) copy_async<4>(&means.rstd, a_.rstd + row, true);
      copy_row(x(stage, warp), a_.x + row * a_.x_stride);
      if (a_.accumulate_dx) copy_row(dx(stage, warp), a_.dx + row * a_.x_stride);
      copy_row(dy(stage, warp), a_.dy + row * a_.width);
    }
    end_copies();
  }

  // Waits for a stage, and takes the means of a warp's row over its columns.
  __device__ __forceinline__ void reduce(int stage, int64_t first) {
    wait_for_copies<1>();
    __syncwarp();  // a row's copies are from all lanes
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    if (warp < rows_ && first + warp < end_) {
      Means& means = means_[stage * kRows + warp];
      float sum = 0.0f, sum_normalized = 0.0f;
#pragma unroll 4
      for (int c = 4 * lane; c < width_; c += 128) {
        float x4[4], g[4], gamma[4];
        read(stage, warp, c, means, x4, g);
        load<4>(a_.gamma + c, gamma);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          sum += g[k] * gamma[k];
          sum_normalized += g[k] * gamma[k] * x4[k];
        }
      }
      sum = group_reduce<32>(sum, Sum()) * inverse_width_;
      sum_normalized = group_reduce<32>(sum_normalized, Sum()) * inverse_width_;
      if (lane == 0) means.sum = sum, means.sum_normalized = sum_normalized;
    }
    __syncthreads();
  }

  // Writes dx, and adds to the thread's sums over rows.
  __device__ __forceinline__ void apply(int stage, int64_t first) {
#pragma unroll 2
    for (int row = group_; row < rows_ && first + row < end_ && group_ < groups_; row += groups_) {
      const Means means = means_[stage * kRows + row];
      float x4[4], g[4], out[4] = {};
      read(stage, row, column_, means, x4, g);
      if (a_.accumulate_dx) load<4>(dx(stage, row) + column_, out);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        sums_[0][k] += g[k] * x4[k];
        sums_[1][k] += g[k];
        out[k] += means.rstd * (g[k] * gamma_[k] - means.sum - x4[k] * means.sum_normalized);
      }
      const int64_t at = (first + row) * a_.x_stride + column_;
      store_wide<4>(a_.dx + at, out);
      add<4>(out, sums_[2]);
      if (a_.dx_rounded != nullptr) store<4>(a_.dx_rounded + at, out);
    }
    __syncthreads();  // the stage may be overwritten
  }

  // Adds the groups' sums in order, and writes the totals to partial(3, width).
  __device__ __forceinline__ void store_sums(float* partial) {
    wait_for_copies<0>();
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (group_ < groups_) store<4>(memory_ + (group_ * 3 + i) * width_ + column_, sums_[i]);
    }
    __syncthreads();
    if (group_ != 0) return;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
#pragma unroll 1
      for (int group = 1; group < groups_; ++group) {
        float other[4];
        load<4>(memory_ + (group * 3 + i) * width_ + column_, other);
        add<4>(other, sums_[i]);
      }
      store_wide<4>(partial + i * width_ + column_, sums_[i]);
    }
  }

 private:
  struct Means {
    float mean, rstd, sum, sum_normalized;
  };
  template <typename T>
  __device__ __forceinline__ void copy_row(T* to, const T* from) const {
    constexpr int V = kVector<T>;
    const int begin = static_cast<int>(threadIdx.x) % 32 * V, left = width_ - begin;
    to += begin, from += begin;
#pragma unroll
    for (int c = 0; c < kLongestSlicedRow; c += 32 * V) {
      if (c < left) copy_async<16>(to + c, from + c, true);
    }
  }
  __device__ __forceinline__ float* x(int stage, int row) const {
    return memory_ + (stage * rows_ + row) * width_;
  }
  __device__ __forceinline__ float* dx(int stage, int row) const {
    return x(stage + 2, row);
  }
  __device__ __forceinline__ S* dy(int stage, int row) const {
    return reinterpret_cast<S*>(x(4, 0)) + (stage * rows_ + row) * width_;
  }
  // Reads four columns: the normalized x, and dy.
  __device__ __forceinline__ void read(int stage, int row, int c, const Means& means, float (&x4)[4],
                                       float (&g)[4]) const {
    load<4>(x(stage, row) + c, x4);
    load<4>(dy(stage, row) + c, g);
#pragma unroll
    for (int k = 0; k < 4; ++k) x4[k] = (x4[k] - means.mean) * means.rstd;
  }

  const LayerNormBackward<S>& a_;
  int width_;
  float inverse_width_;
  int rows_;
  int64_t end_;
  Means* means_;   // of two stages
  float* memory_;  // x, dx and dy, two stages each
  int column_, group_, groups_;
  float gamma_[4];         // of the thread's columns
  float sums_[3][4] = {};  // d_gamma, d_beta, sum of dx
};

// Processes one chunk of rows per block. Writes (d_gamma, d_beta, dx_sum) of the chunk to workspace(chunk, 3,
// width).
template <typename S>
__global__ void __launch_bounds__(kRowThreads, 1)
    layer_norm_backward_slice_kernel(const __grid_constant__ LayerNormBackward<S> a, int64_t rows_per_chunk,
                                     int rows_per_stage) {
  GW_DYNAMIC_SHARED(unsigned char, memory);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * rows_per_chunk;
  const int64_t end = begin + rows_per_chunk < a.rows ? begin + rows_per_chunk : a.rows;
  BackwardRows<S> rows(a, rows_per_stage, end, memory);
  rows.begin(0, begin);
  rows.begin(1, begin + rows_per_stage);
  int stage = 0;
  for (int64_t first = begin; first < end; first += rows_per_stage, stage ^= 1) {
    rows.reduce(stage, first);
    rows.apply(stage, first);
    rows.begin(stage, first + 2 * rows_per_stage);
  }
  rows.store_sums(a.workspace + static_cast<int64_t>(blockIdx.x) * 3 * a.width);
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
    constexpr size_t kMost = 163 << 10;  // on sm_80
    int rows = BackwardRows<S>::kRows;
    while (rows > 1 && BackwardRows<S>::shared_bytes(a.width, rows) > std::min(kMost, max_shared_bytes()))
      --rows;
    launch("layer_norm_backward", layer_norm_backward_slice_kernel<S>,
           {.grid = dim3(count),
            .block = dim3(kRowThreads),
            .shared_bytes = BackwardRows<S>::shared_bytes(a.width, rows),
            .stream = stream},
           a, chunks.rows, rows);
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
