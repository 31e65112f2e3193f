// layer_norm, softmax and their backward passes: a row to a group of lanes or, in layer_norm_backward, to a
// warp.
//
// Rows of up to 1024 elements (a multiple of 4, or of 8 with BF16 operands, aligned) are read once: they stay
// in registers between the passes or, in layer_norm_backward, in shared memory. In 16-byte accesses
// layer_norm moves 8 B (FP32) or 6 B (BF16) per element, or 16 or 12 B with a residual branch; softmax 8 or 6
// B, and its backward pass 12 or 6 B. layer_norm_backward moves 12 or 10 B, plus 4 B when accumulating into
// dx and 2 B for a rounded copy of dx. It computes d_gamma, d_beta and the sum of dx in the same pass: a
// block owns a chunk of rows (kernels/math/column_chunks.h); its threads keep per-column sums in registers
// and write one partial row. A second kernel adds the partial rows in order.
//
// Longer rows are read again, in pieces, from cache, and rows that are not aligned in 4-byte accesses. There
// layer_norm_backward takes a launch per sum. Limit: memory bandwidth. Deterministic: no atomics.
#include <algorithm>

#include "kernels/cuda/copies.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/math/gelu.h"
#include "kernels/vit/elementwise.h"
#include "kernels/vit/layer_norm.h"
#include "kernels/vit/softmax.h"

namespace gradwire::cuda {
namespace {

// Calls f(j, k) for the values v[j][k] of a slice.
template <int Items, int V, typename F>
__device__ __forceinline__ void each(const F& f) {
#pragma unroll
  for (int j = 0; j < Items; ++j) {
#pragma unroll
    for (int k = 0; k < V; ++k) f(j, k);
  }
}

// Calls run.template operator()<G, Items, V, kFits>() with the slice for rows of `width` elements at all of
// the pointers; unless kFits, a row has several pieces of the slice's size.
template <typename S, typename Run, typename... Pointers>
void with_slice(int64_t width, bool aligned_rows, const Run& run, Pointers... pointers) {
  constexpr int V = kVector<S>;
  if (!aligned_rows || !takes_vectors<S>(width, pointers...))
    return run.template operator()<32, 8, 1, false>();
  if (width > kLongestSlicedRow) return run.template operator()<32, 8, 4, false>();
  with_row_slice<V>(width, [&]<int G, int Items>() { run.template operator()<G, Items, V, true>(); });
}

// Adds branch + branch_bias to x, and also stores the result in `sum`, for `width` columns from `first` on.
template <int G, int Items, int V, typename S>
__device__ __forceinline__ void join_branch(const LayerNorm<S>& a, int64_t row, int first, int width,
                                            RowSlice<G, Items, V>& x) {
  using Slice = RowSlice<G, Items, V>;
#pragma unroll
  for (int j = 0; j < Items; ++j) {
    const int c = first + Slice::column(j);
    if (Slice::column(j) >= width) continue;
    float branch[V], bias[V];
    load<V>(a.branch + row * a.x_stride + c, branch);
    load<V>(a.branch_bias + c, bias);
#pragma unroll
    for (int k = 0; k < V; ++k) x.v[j][k] += branch[k] + bias[k];
    store<V>(a.sum + row * a.x_stride + c, x.v[j]);
  }
}

template <int G, int Items, int V, bool kFits, typename S>
__global__ void __launch_bounds__(kSliceThreads) layer_norm_slice_kernel(LayerNorm<S> a) {
  wait_for_earlier_kernels();
  using Slice = RowSlice<G, Items, V>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * Slice::kRowsPerBlock + Slice::group();
  const bool live = row < a.rows;
  const int width = static_cast<int>(a.width), end = kFits ? 1 : width;
  const float inverse_width = 1.0f / static_cast<float>(width);
  Slice x, gamma, beta;
  const auto read_parameters = [&](int first) {
    gamma.read(a.gamma + first, width - first, live);
    beta.read(a.beta + first, width - first, live);
  };
  const auto read_again = [&](int first) {
    x.read((a.branch != nullptr ? a.sum : a.x) + row * a.x_stride + first, width - first, live);
  };
  float sum = 0.0f;
#pragma unroll 1
  for (int first = 0; first < end; first += Slice::kWidth) {
    x.read(a.x + row * a.x_stride + first, width - first, live);
    if (kFits) read_parameters(first);  // before the sums, which would delay the loads
    if (a.branch != nullptr && live) join_branch(a, row, first, width - first, x);
#pragma unroll
    for (const auto& v : x.v) {
#pragma unroll
      for (int k = 0; k < V; k += 4)
        sum += V == 1 ? v[k] : (v[k] + v[k + 1 % V]) + (v[k + 2 % V] + v[k + 3 % V]);
    }
  }
  const float mean = group_reduce<G>(sum, Sum()) * inverse_width;
  float squares = 0.0f;
#pragma unroll 1
  for (int first = 0; first < end; first += Slice::kWidth) {
    if (!kFits) read_again(first);
#pragma unroll
    for (int j = 0; j < Items; ++j) {
      if (Slice::column(j) >= width - first) continue;
#pragma unroll
      for (int k = 0; k < V; ++k) {
        x.v[j][k] -= mean;
        squares += x.v[j][k] * x.v[j][k];
      }
    }
  }
  const float rstd = 1.0f / sqrtf(group_reduce<G>(squares, Sum()) * inverse_width + a.eps);
  if (!live) return;
#pragma unroll 1
  for (int first = 0; first < end; first += Slice::kWidth) {
    if (!kFits) read_again(first), read_parameters(first);
    each<Items, V>([&](int j, int k) {
      const float centered = kFits ? x.v[j][k] : x.v[j][k] - mean;
      x.v[j][k] = centered * rstd * gamma.v[j][k] + beta.v[j][k];
    });
    x.write(a.y + row * a.width + first, width - first, true);
  }
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
  wait_for_earlier_kernels();
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
__global__ void __launch_bounds__(kRowThreads) layer_norm_backward_kernel(LayerNormBackward<S> a) {
  wait_for_earlier_kernels();
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

// The terms of sum `which` over rows: d_gamma, d_beta, or that of dx.
template <typename S>
struct RowTerms {
  LayerNormBackward<S> a;
  int which;

  template <int W>
  __device__ __forceinline__ void at(int64_t row, int64_t c, float (&out)[W]) const {
    if (which == 2) return load<W>(a.dx + row * a.x_stride + c, out);
    load<W>(a.dy + row * a.width + c, out);
    if (which == 1) return;
    float x[W];
    load<W>(a.x + row * a.x_stride + c, x);
#pragma unroll
    for (int k = 0; k < W; ++k) out[k] *= (x[k] - a.mean[row]) * a.rstd[row];
  }
};

template <int G, int Items, int V, bool kFits, typename S>
__global__ void __launch_bounds__(kSliceThreads) softmax_slice_kernel(Softmax<S> a) {
  wait_for_earlier_kernels();
  using Slice = RowSlice<G, Items, V>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * Slice::kRowsPerBlock + Slice::group();
  const bool live = row < a.rows;
  const int width = static_cast<int>(a.width), ld = static_cast<int>(a.ld), end = kFits ? 1 : ld;
  float* const x = a.x + row * a.ld;
  Slice s;
  float highest = Max::kIdentity, sum = 0.0f;
#pragma unroll 1
  for (int first = 0; first < end; first += Slice::kWidth) {
    s.read(x + first, ld - first, live);
    each<Items, V>([&](int j, int k) {
      s.v[j][k] *= a.scale;
      if (first + Slice::column(j) + k < width) highest = Max()(s.v[j][k], highest);
    });
  }
  highest = group_reduce<G>(highest, Max());
#pragma unroll 1
  for (int first = 0; first < end; first += Slice::kWidth) {
    if (!kFits) s.read(x + first, ld - first, live);
    each<Items, V>([&](int j, int k) {
      if (!kFits) s.v[j][k] *= a.scale;
      s.v[j][k] = first + Slice::column(j) + k < width ? exp_float(s.v[j][k] - highest) : 0.0f;
      sum += s.v[j][k];
    });
    if (!kFits) s.write(x + first, ld - first, live);
  }
  const float inverse = 1.0f / group_reduce<G>(sum, Sum());
#pragma unroll 1
  for (int first = 0; first < end; first += Slice::kWidth) {
    if (!kFits) s.read(x + first, ld - first, live);
    each<Items, V>([&](int j, int k) {
      if (first + Slice::column(j) + k < width) s.v[j][k] *= inverse;
    });
    s.write(a.y + row * a.ld + first, ld - first, live);
  }
}

template <int G, int Items, int V, bool kFits, typename S>
__global__ void __launch_bounds__(kSliceThreads) softmax_backward_slice_kernel(SoftmaxBackward<S> a) {
  wait_for_earlier_kernels();
  using Slice = RowSlice<G, Items, V>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * Slice::kRowsPerBlock + Slice::group();
  const bool live = row < a.rows;
  const int width = static_cast<int>(a.width), ld = static_cast<int>(a.ld), end = kFits ? 1 : ld;
  Slice y, d;
  const auto read = [&](int first) {
    y.read(a.y + row * a.ld + first, ld - first, live);
    d.read(a.dy + row * a.ld + first, ld - first, live);
  };
  float dot = 0.0f;
#pragma unroll 1
  for (int first = 0; first < end; first += Slice::kWidth) {
    read(first);
    each<Items, V>([&](int j, int k) {
      if (first + Slice::column(j) + k < width) dot += y.v[j][k] * d.v[j][k];
    });
  }
  dot = group_reduce<G>(dot, Sum());
#pragma unroll 1
  for (int first = 0; first < end; first += Slice::kWidth) {
    if (!kFits) read(first);
    each<Items, V>([&](int j, int k) {
      const bool there = first + Slice::column(j) + k < width;
      d.v[j][k] = there ? a.scale * y.v[j][k] * (d.v[j][k] - dot) : 0.0f;
    });
    d.write(a.dy + row * a.ld + first, ld - first, live);
  }
}

}  // namespace

template <typename S>
void layer_norm(CudaStream stream, const LayerNorm<S>& args) {
  LayerNorm<S> a = args;
  if (a.x_stride == 0) a.x_stride = a.width;
  if (a.rows <= 0 || a.width <= 0) return;
  with_slice<S>(
      a.width, a.x_stride % kVector<S> == 0,
      [&]<int G, int Items, int V, bool kFits>() {
        launch("layer_norm", layer_norm_slice_kernel<G, Items, V, kFits, S>,
               row_slice_launch<G>(stream, a.rows), a);
      },
      a.x, a.gamma, a.beta, a.y, a.branch, a.branch_bias, a.sum);
}

template <typename S>
void layer_norm_backward(CudaStream stream, const LayerNormBackward<S>& args) {
  LayerNormBackward<S> a = args;
  if (a.x_stride == 0) a.x_stride = a.width;
  if (a.width <= 0) return;
  const auto chunks = column_chunks(a.rows);
  const bool vectors = a.x_stride % kVector<S> == 0 &&
                       takes_vectors<S>(a.width, a.x, a.dy, a.gamma, a.dx, a.dx_rounded, a.workspace);
  if (vectors && a.width <= kLongestSlicedRow) {
    constexpr size_t kMost = 163 << 10;  // on sm_80
    int rows = BackwardRows<S>::kRows;
    while (rows > 1 && BackwardRows<S>::shared_bytes(a.width, rows) > std::min(kMost, max_shared_bytes()))
      --rows;
    launch("layer_norm_backward", layer_norm_backward_slice_kernel<S>,
           {.grid = dim3(static_cast<unsigned>(chunks.count)),
            .block = dim3(kRowThreads),
            .shared_bytes = BackwardRows<S>::shared_bytes(a.width, rows),
            .stream = stream},
           a, chunks.rows, rows);
  } else {
    const auto sum_terms = [&](int which) {
      partial_sums_over_rows<S>("layer_norm_sums", stream, vectors, RowTerms<S>{a, which}, a.rows, a.width,
                                a.workspace + which * a.width, 3 * a.width);
    };
    sum_terms(0), sum_terms(1);  // first, because dx may replace dy or x
    launch("layer_norm_backward", layer_norm_backward_kernel<S>, row_launch(stream, a.rows, a.width), a);
    if (a.dx_sum != nullptr) sum_terms(2);
  }
  if (!a.partial_only) combine_sums(stream, {{a.sums()}});
}

template <typename S>
void softmax(CudaStream stream, const Softmax<S>& a) {
  if (a.rows <= 0 || a.ld <= 0) return;
  with_slice<S>(
      a.ld, true,
      [&]<int G, int Items, int V, bool kFits>() {
        launch("softmax", softmax_slice_kernel<G, Items, V, kFits, S>, row_slice_launch<G>(stream, a.rows),
               a);
      },
      a.x, a.y);
}

template <typename S>
void softmax_backward(CudaStream stream, const SoftmaxBackward<S>& a) {
  if (a.rows <= 0 || a.ld <= 0) return;
  with_slice<S>(
      a.ld, true,
      [&]<int G, int Items, int V, bool kFits>() {
        launch("softmax_backward", softmax_backward_slice_kernel<G, Items, V, kFits, S>,
               row_slice_launch<G>(stream, a.rows), a);
      },
      a.y, a.dy);
}

GW_INSTANTIATE_CUDA_OP(layer_norm, LayerNorm)
GW_INSTANTIATE_CUDA_OP(layer_norm_backward, LayerNormBackward)
GW_INSTANTIATE_CUDA_OP(softmax, Softmax)
GW_INSTANTIATE_CUDA_OP(softmax_backward, SoftmaxBackward)

}  // namespace gradwire::cuda
