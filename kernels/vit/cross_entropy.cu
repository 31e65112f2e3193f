// cross_entropy: one warp per row, then one block that adds the rows in order. If a block has at least as
// many warps as there are rows, one block in one launch computes everything. For 32,000 logits, one
// multiprocessor takes about 2 us longer than four multiprocessors; a second launch and its wait also take 2
// us.
//
// Reads the logits once from memory (three passes, the later ones from cache) and writes the gradients: 8 B
// (FP32) or 6 B (BF16) per logit. Limit: launch latency at the sizes of a classifier head. Deterministic:
// losses are added in row order, in double.
#include <limits>

#include "kernels/cuda/vector.cuh"
#include "kernels/math/gelu.h"
#include "kernels/vit/cross_entropy.h"

namespace gradwire::cuda {
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
