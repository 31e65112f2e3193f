// softmax and softmax_backward, fused with the scale and the zeroing of the padding.
//
// Rows of up to 1024 elements whose ld is a multiple of 4 (8 with BF16 operands) stay in registers between
// the passes: softmax moves 8 B (FP32) or 6 B (BF16) per element, and its backward pass 12 or 6 B, in 16-byte
// accesses. Other rows are processed by one block each, with 4-byte accesses, and read again from cache.
// Limit: memory bandwidth. Deterministic.
#include "kernels/vit/softmax.h"

#include <limits>

#include "kernels/cuda/vector.cuh"
#include "kernels/math/gelu.h"

namespace gradwire::cuda {
namespace {

template <int G, int Items, typename S>
__global__ void __launch_bounds__(kRowThreads) softmax_slice_kernel(Softmax<S> a) {
  constexpr int V = kVector<S>;
  using Slice = RowSlice<G, Items, V>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * Slice::kRowsPerBlock + Slice::group();
  const bool live = row < a.rows;
  const int width = static_cast<int>(a.width), ld = static_cast<int>(a.ld);
  Slice s;
  s.read(a.x + row * a.ld, ld, live);
  float highest = Max::kIdentity;
#pragma unroll
  for (int j = 0; j < Items; ++j) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      s.v[j][k] *= a.scale;
      if (Slice::column(j) + k < width) highest = Max()(s.v[j][k], highest);
    }
  }
  highest = group_reduce<G>(highest, Max());
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < Items; ++j) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      s.v[j][k] = Slice::column(j) + k < width ? exp_float(s.v[j][k] - highest) : 0.0f;
      sum += s.v[j][k];
    }
  }
  const float inverse = 1.0f / group_reduce<G>(sum, Sum());
#pragma unroll
  for (int j = 0; j < Items; ++j) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (Slice::column(j) + k < width) s.v[j][k] *= inverse;
    }
  }
  s.write(a.y + row * a.ld, ld, live);
}

template <int G, int Items, typename S>
__global__ void __launch_bounds__(kRowThreads) softmax_backward_slice_kernel(SoftmaxBackward<S> a) {
  constexpr int V = kVector<S>;
  using Slice = RowSlice<G, Items, V>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * Slice::kRowsPerBlock + Slice::group();
  const bool live = row < a.rows;
  const int width = static_cast<int>(a.width), ld = static_cast<int>(a.ld);
  Slice y, d;
  y.read(a.y + row * a.ld, ld, live);
  d.read(a.dy + row * a.ld, ld, live);
  float dot = 0.0f;
#pragma unroll
  for (int j = 0; j < Items; ++j) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (Slice::column(j) + k < width) dot += y.v[j][k] * d.v[j][k];
    }
  }
  dot = group_reduce<G>(dot, Sum());
#pragma unroll
  for (int j = 0; j < Items; ++j) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      d.v[j][k] = Slice::column(j) + k < width ? a.scale * y.v[j][k] * (d.v[j][k] - dot) : 0.0f;
    }
  }
  d.write(a.dy + row * a.ld, ld, live);
}

// Processes one row per block. A thread accesses the same elements in every pass, so only the sums need a
// barrier.
template <typename S>
__global__ void __launch_bounds__(kRowThreads) softmax_kernel(Softmax<S> a) {
  __shared__ float shared[32];
  float* x = a.x + static_cast<int64_t>(blockIdx.x) * a.ld;
  S* y = a.y + static_cast<int64_t>(blockIdx.x) * a.ld;
  float highest = Max::kIdentity;
  for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x) highest = Max()(a.scale * x[c], highest);
  highest = block_reduce(highest, shared, Max());
  float sum = 0.0f;
  for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x) {
    const float e = exp_float(a.scale * x[c] - highest);
    x[c] = e;
    sum += e;
  }
  const float inverse = 1.0f / block_reduce(sum, shared, Sum());
  for (int64_t c = threadIdx.x; c < a.ld; c += blockDim.x)
    y[c] = narrow<S>(c < a.width ? x[c] * inverse : 0.0f);
}

template <typename S>
__global__ void __launch_bounds__(kRowThreads) softmax_backward_kernel(SoftmaxBackward<S> a) {
  __shared__ float shared[32];
  const S* y = a.y + static_cast<int64_t>(blockIdx.x) * a.ld;
  S* dy = a.dy + static_cast<int64_t>(blockIdx.x) * a.ld;
  float dot = 0.0f;
  for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x) dot += widen(y[c]) * widen(dy[c]);
  dot = block_reduce(dot, shared, Sum());
  for (int64_t c = threadIdx.x; c < a.ld; c += blockDim.x) {
    dy[c] = narrow<S>(c < a.width ? a.scale * widen(y[c]) * (widen(dy[c]) - dot) : 0.0f);
  }
}

template <typename S, typename... Pointers>
bool sliceable(int64_t ld, Pointers... pointers) {
  return ld <= kLongestSlicedRow && takes_vectors<S>(ld, pointers...);
}

}  // namespace

template <typename S>
void softmax(CudaStream stream, const Softmax<S>& a) {
  if (a.rows <= 0 || a.ld <= 0) return;
  if (sliceable<S>(a.ld, a.x, a.y)) {
    with_row_slice<kVector<S>>(a.ld, [&]<int G, int Items>() {
      launch("softmax", softmax_slice_kernel<G, Items, S>, row_slice_launch<G>(stream, a.rows), a);
    });
  } else {
    launch("softmax", softmax_kernel<S>, row_launch(stream, a.rows, a.ld), a);
  }
}

template <typename S>
void softmax_backward(CudaStream stream, const SoftmaxBackward<S>& a) {
  if (a.rows <= 0 || a.ld <= 0) return;
  if (sliceable<S>(a.ld, a.y, a.dy)) {
    with_row_slice<kVector<S>>(a.ld, [&]<int G, int Items>() {
      launch("softmax_backward", softmax_backward_slice_kernel<G, Items, S>,
             row_slice_launch<G>(stream, a.rows), a);
    });
  } else {
    launch("softmax_backward", softmax_backward_kernel<S>, row_launch(stream, a.rows, a.ld), a);
  }
}

GW_INSTANTIATE_CUDA_OP(softmax, Softmax)
GW_INSTANTIATE_CUDA_OP(softmax_backward, SoftmaxBackward)

// cross_entropy: one warp per row, then one block that adds the rows in order. If a block has at least as
// many warps as there are rows, one block in one launch computes everything. For 32,000 logits, one
// multiprocessor takes about 2 us longer than four multiprocessors; a second launch and its wait also take 2
// us.
//
// Reads the logits once from memory (three passes, the later ones from cache) and writes the gradients: 8 B
// (FP32) or 6 B (BF16) per logit. Limit: launch latency at the sizes of a classifier head. Deterministic:
// losses are added in row order, in double.

namespace {

constexpr int kThreads = 256, kRowsPerBlock = kThreads / 32;

// Writes the row's gradient; the first lane calls keep(loss, 1 if correct). Called by a whole warp.
template <typename S, typename Keep>
__device__ __forceinline__ void cross_entropy_of(const CrossEntropy<S>& a, int64_t row, const Keep& keep) {
  const int64_t lane = threadIdx.x % 32, label = a.labels[row];
  const float* x = a.logits + row * a.classes;
  S* d = a.d_logits != nullptr ? a.d_logits + row * a.classes : nullptr;
  if (label < 0 || label >= a.classes) {
    constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
    if (lane == 0) keep(kNan, 0.0f);
    for (int64_t c = lane; d != nullptr && c < a.classes; c += 32) d[c] = narrow<S>(kNan);
    return;
  }
  const float at_label = x[label];
  float highest = Max::kIdentity;
  // The prediction is correct if all logits before the label are smaller and no logit after the label is
  // larger; a NaN is never correct.
  bool right = true;
  for (int64_t c = lane; c < a.classes; c += 32) {
    const float v = x[c];
    highest = Max()(v, highest);
    right = right && (c < label ? v < at_label : v <= at_label);
  }
  highest = group_reduce<32>(highest, Max());
  right = __all_sync(kFullWarp, right) != 0;
  float sum = 0.0f;
  for (int64_t c = lane; c < a.classes; c += 32) sum += exp_float(x[c] - highest);
  sum = group_reduce<32>(sum, Sum());
  if (lane == 0) keep(logf(sum) + (highest - at_label), right ? 1.0f : 0.0f);
  if (d == nullptr) return;
  const float scale = a.grad_scale / sum;
  for (int64_t c = lane; c < a.classes; c += 32) {
    d[c] = narrow<S>(scale * exp_float(x[c] - highest) - (c == label ? a.grad_scale : 0.0f));
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads) cross_entropy_kernel(CrossEntropy<S> a) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / 32;
  if (row >= a.rows) return;  // returns in the whole warp
  cross_entropy_of(a, row, [&](float loss, float right) {
    a.workspace[row] = loss;
    a.workspace[a.rows + row] = right;
  });
}

// Combines cross_entropy_kernel and add_losses_kernel, for at most as many rows as the block has warps; there
// may be 0 rows.
template <typename S>
__global__ void __launch_bounds__(32 * CrossEntropy<S>::kOneBlock)
    cross_entropy_block_kernel(CrossEntropy<S> a) {
  __shared__ float loss[CrossEntropy<S>::kOneBlock], right[CrossEntropy<S>::kOneBlock];
  const int64_t row = threadIdx.x / 32;
  if (row < a.rows) {
    cross_entropy_of(a, row, [&](float row_loss, float row_right) {
      loss[row] = row_loss;
      right[row] = row_right;
    });
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total_loss = a.accumulate ? a.totals[0] : 0.0, total_right = a.accumulate ? a.totals[1] : 0.0;
  for (int64_t i = 0; i < a.rows; ++i) {
    total_loss += loss[i];
    total_right += right[i];
  }
  a.totals[0] = total_loss;
  a.totals[1] = total_right;
}

__global__ void __launch_bounds__(kThreads)
    add_losses_kernel(const float* losses, int64_t rows, bool accumulate, double* totals) {
  __shared__ float loss[kThreads], right[kThreads];
  double total_loss = accumulate ? totals[0] : 0.0, total_right = accumulate ? totals[1] : 0.0;
  for (int64_t first = 0; first < rows; first += kThreads) {
    const int64_t row = first + threadIdx.x;
    if (row < rows) {
      loss[threadIdx.x] = losses[row];
      right[threadIdx.x] = losses[rows + row];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      const int count = static_cast<int>(rows - first < kThreads ? rows - first : kThreads);
      for (int i = 0; i < count; ++i) {
        total_loss += loss[i];
        total_right += right[i];
      }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    totals[0] = total_loss;
    totals[1] = total_right;
  }
}

}  // namespace

template <typename S>
void cross_entropy(CudaStream stream, const CrossEntropy<S>& a) {
  if (a.rows <= CrossEntropy<S>::kOneBlock) {
    const int64_t warps = a.rows > 0 ? a.rows : 1;
    launch("cross_entropy", cross_entropy_block_kernel<S>,
           {.grid = dim3(1), .block = dim3(static_cast<unsigned>(32 * warps)), .stream = stream}, a);
    return;
  }
  launch("cross_entropy", cross_entropy_kernel<S>,
         {.grid = dim3(static_cast<unsigned>((a.rows + kRowsPerBlock - 1) / kRowsPerBlock)),
          .block = dim3(kThreads),
          .stream = stream},
         a);
  launch("add_losses", add_losses_kernel, {.grid = dim3(1), .block = dim3(kThreads), .stream = stream},
         a.workspace, a.rows, a.accumulate, a.totals);
}

GW_INSTANTIATE_CUDA_OP(cross_entropy, CrossEntropy)

}  // namespace gradwire::cuda
