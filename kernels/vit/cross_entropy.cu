// cross_entropy: one warp per row, then one block that adds the rows. If a block has at least as many warps
// as there are rows, one block in one launch computes everything. For 32,000 logits, one multiprocessor takes
// about 2 us longer than four multiprocessors; a second launch and its wait also take 2 us.
//
// Rows of up to 1024 classes (256 if not in vectors) stay in registers: 8 B (FP32) or 6 B (BF16) per logit,
// one exponential each. Longer rows are read, and their exponentials computed, twice. Limit: launch latency
// at the sizes of a classifier head. Deterministic: losses are added in fixed order, in double.
#include <limits>

#include "kernels/cuda/vector.cuh"
#include "kernels/math/gelu.h"
#include "kernels/vit/softmax.h"

namespace gradwire::cuda {
namespace {

constexpr int kThreads = 256, kRowsPerBlock = kThreads / 32;

// The logits of a row that a warp holds: 8 per lane, or 32 in vectors of four.
template <int V>
struct LogitTile {
  static constexpr int kEach = 8 * V, kWidth = 32 * kEach;
  float v[kEach / V][V];

  // Returns the first column of the lane; the others of a vector follow, the next vector is 32 V further.
  static __device__ __forceinline__ int column() { return static_cast<int>(threadIdx.x) % 32 * V; }
  // Reads columns 0 to `width` - 1 of x; the others are minus infinity.
  __device__ __forceinline__ void read(const float* x, int width) {
    x += column(), width -= column();
#pragma unroll
    for (int j = 0; j < kEach / V; ++j) {
#pragma unroll
      for (int k = 0; k < V; ++k) v[j][k] = Max::kIdentity;
      if (32 * V * j < width) load<V>(x + 32 * V * j, v[j]);
    }
  }
  template <typename S>
  __device__ __forceinline__ void write(S* y, int width) const {
    y += column(), width -= column();
#pragma unroll
    for (int j = 0; j < kEach / V; ++j) {
      if (32 * V * j < width) store<V>(y + 32 * V * j, v[j]);
    }
  }
  // Replaces each x by exp(x - top), where top is at least as large, and returns their sum. The rounding of
  // the product is at most 4e-8 of the largest exponential, 1.
  __device__ __forceinline__ float exponentials(float top) {
    float sum = 0.0f;
#pragma unroll
    for (auto& vector : v) {
#pragma unroll
      for (float& x : vector) sum += x = exp2_estimate((x - top) * kLog2E);
    }
    return sum;
  }
  static constexpr float kLog2E = 1.44269504f;
};

// Writes the row's gradient; the first lane calls keep(loss, 1 if correct). Called by a whole warp. kFits:
// the row has at most one tile.
template <int V, bool kFits, typename S, typename Keep>
__device__ __forceinline__ void cross_entropy_of(const CrossEntropy<S>& a, uint32_t row, const Keep& keep) {
  using Tile = LogitTile<V>;
  const int named = a.labels[row], classes = static_cast<int>(a.classes);
  const bool labelled = named >= 0 && named < classes;
  const int label = labelled ? named : 0;
  const float* x = a.logits + int64_t{row} * classes;
  const float at_label = labelled ? x[label] : std::numeric_limits<float>::quiet_NaN();
  float highest = Max::kIdentity, sum = 0.0f;
  bool tied = false;  // whether a logit before the label is as large
  Tile tile;
#pragma unroll 1
  for (int first = 0; first < (kFits ? 1 : classes); first += Tile::kWidth) {
    tile.read(x + first, classes - first);
    float top = highest;
#pragma unroll
    for (const auto& vector : tile.v) {
#pragma unroll
      for (const float v : vector) top = fmaxf(v, top);
    }
    top = group_reduce<32>(top, Max());
    if (at_label == top) {
      const int before = label - first - Tile::column();
#pragma unroll
      for (int i = 0; i < Tile::kEach; ++i)
        tied |= tile.v[i / V][i % V] == top && i / V * 32 * V + i % V < before;
    }
    const float part = group_reduce<32>(tile.exponentials(top), Sum());
    sum = part + (first == 0 ? 0.0f : sum * exp2_estimate((highest - top) * Tile::kLog2E));
    highest = top;
  }
  S* d = a.d_logits + int64_t{row} * classes;
  const float scale = labelled ? a.grad_scale / sum : at_label;
#pragma unroll 1
  for (int first = 0; a.d_logits != nullptr && first < (kFits ? 1 : classes); first += Tile::kWidth) {
    if (!kFits && classes > Tile::kWidth) {
      tile.read(x + first, classes - first);
      tile.exponentials(highest);
    }
#pragma unroll
    for (auto& vector : tile.v) {
#pragma unroll
      for (float& v : vector) v *= scale;
    }
    tile.write(d + first, classes - first);
  }
  // The lane that has written the label's gradient writes it again.
  if (a.d_logits != nullptr && labelled && label / V % 32 == static_cast<int>(threadIdx.x) % 32)
    d[label] = narrow<S>(scale * exp2_estimate((at_label - highest) * Tile::kLog2E) - a.grad_scale);
  // A NaN is never correct.
  const bool right = __any_sync(kFullWarp, tied) == 0 && at_label == highest && sum == sum;
  if (threadIdx.x % 32 == 0) keep(logf(sum) + (highest - at_label), right ? 1.0f : 0.0f);
}

template <int V, typename S>
__global__ void __launch_bounds__(kThreads) cross_entropy_kernel(CrossEntropy<S> a) {
  wait_for_earlier_kernels();
  const uint32_t row = blockIdx.x * kRowsPerBlock + threadIdx.x / 32;
  if (row >= a.rows) return;  // returns in the whole warp
  cross_entropy_of<V, false>(a, row, [&](float loss, float right) {
    a.workspace[row] = loss;
    a.workspace[a.rows + row] = right;
  });
}

// Adds the block's numbers, one of each kind per thread: the lanes of each warp by halves, then the warps in
// order. The block has whole warps.
__device__ __forceinline__ void add_to_totals(double loss, double right, bool accumulate, double* totals) {
  __shared__ double shared[2][32];
  const unsigned warp = threadIdx.x / 32;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    loss += __shfl_xor_sync(kFullWarp, loss, distance);
    right += __shfl_xor_sync(kFullWarp, right, distance);
  }
  if (threadIdx.x % 32 == 0) shared[0][warp] = loss, shared[1][warp] = right;
  __syncthreads();
  if (threadIdx.x > 1) return;
  double total = accumulate ? totals[threadIdx.x] : 0.0;
  for (unsigned i = 0; i < blockDim.x / 32; ++i) total += shared[threadIdx.x][i];
  totals[threadIdx.x] = total;
}

// Combines cross_entropy_kernel and add_losses_kernel, for at most as many rows as the block has warps, of
// one tile each; there may be 0 rows.
template <int V, typename S>
__global__ void __launch_bounds__(32 * CrossEntropy<S>::kOneBlock, 1)
    cross_entropy_block_kernel(CrossEntropy<S> a) {
  wait_for_earlier_kernels();
  const uint32_t row = threadIdx.x / 32;
  float loss = 0.0f, right = 0.0f;
  if (row < a.rows) {
    cross_entropy_of<V, true>(a, row,
                              [&](float row_loss, float row_right) { loss = row_loss, right = row_right; });
  }
  add_to_totals(loss, right, a.accumulate, a.totals);
}

__global__ void __launch_bounds__(kThreads)
    add_losses_kernel(const float* losses, int64_t rows, bool accumulate, double* totals) {
  wait_for_earlier_kernels();
  double loss = 0.0, right = 0.0;
#pragma unroll 4
  for (int64_t row = threadIdx.x; row < rows; row += kThreads) {
    loss += losses[row];
    right += losses[rows + row];
  }
  add_to_totals(loss, right, accumulate, totals);
}

}  // namespace

template <typename S>
void cross_entropy(CudaStream stream, const CrossEntropy<S>& a) {
  static_assert(LogitTile<4>::kWidth == 1024 && LogitTile<1>::kWidth == 256);  // as one_block() says
  const bool vectors = a.vectors();
  if (a.one_block()) {
    const int64_t warps = a.rows > 0 ? a.rows : 1;
    launch("cross_entropy", vectors ? cross_entropy_block_kernel<4, S> : cross_entropy_block_kernel<1, S>,
           {.grid = dim3(1), .block = dim3(static_cast<unsigned>(32 * warps)), .stream = stream}, a);
    return;
  }
  launch("cross_entropy", vectors ? cross_entropy_kernel<4, S> : cross_entropy_kernel<1, S>,
         {.grid = dim3(static_cast<unsigned>((a.rows + kRowsPerBlock - 1) / kRowsPerBlock)),
          .block = dim3(kThreads),
          .stream = stream},
         a);
  launch("add_losses", add_losses_kernel, {.grid = dim3(1), .block = dim3(kThreads), .stream = stream},
         a.workspace, a.rows, a.accumulate, a.totals);
}

GW_INSTANTIATE_CUDA_OP(cross_entropy, CrossEntropy)

}  // namespace gradwire::cuda
