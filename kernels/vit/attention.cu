// attention and attention_backward: a block per image and head, which holds the head's rows in shared memory.
// Short sequences in BF16 take the kernels of attention_short.cuh.
//
// Forward: a warp takes 16 queries and walks over the keys, 16 at a time. It computes scores, their
// exponentials relative to the largest so far, and the weighted sum of values, which is rescaled when a
// larger score appears. Backward: the weights are recomputed from the largest score and 1 / sum that forward
// stored for each row. A warp takes 16 queries and walks over the keys, giving dQ, or 16 keys and walks over
// the queries, giving dK and dV. Nothing of size (T, T) is stored, and no two warps add to the same value;
// the price is that backward computes Q K^T and dO V^T twice.
//
// BF16 operands use the tensor cores, FP32 operands FMAs. A weight is rounded to S
// before it multiplies, as in a product of stored operands.
//
// Traffic: each row of qkv, merged and their gradients is moved once. Forward moves 16 B (FP32) or 8 B (BF16)
// per element (b, t, c), backward 32 or 16 B. FLOPs per head: 4 T^2 D forward, 14 T^2 D backward. With BF16
// the limit is memory bandwidth, with FP32 the FMAs. Deterministic: sums in fixed order, no atomics.
#include <algorithm>

#include "kernels/cuda/vector.cuh"
#include "kernels/math/gelu.h"
#include "kernels/vit/attention.cuh"
#include "kernels/vit/attention.h"
#include "kernels/vit/attention_short.cuh"
#include "kernels/vit/elementwise.h"

namespace gradwire::cuda {
namespace {

constexpr int kAttentionThreads = 256;

// Multiplies the lane's values of row 8 r + Lane::row() by `factor`.
template <int kTiles>
__device__ __forceinline__ void scale_row(float factor, int r, Values (&tiles)[kTiles]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    tiles[n][2 * r] *= factor;
    tiles[n][2 * r + 1] *= factor;
  }
}

template <int kDim, typename S>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_kernel(Attention<S> a, float scale, bool aligned) {
  wait_for_earlier_kernels();
  constexpr int kP = kPitch<S, kDim>;
  GW_DYNAMIC_SHARED(float, memory);
  const Head head = head_of(a, aligned);
  const int tokens = static_cast<int>(a.tokens), rows = tile_rows(a.tokens);
  S* q = reinterpret_cast<S*>(memory);
  S* k = q + rows * kP;
  S* v = k + rows * kP;
  head.rows(a.qkv, 3, 0).template load<kDim>(q, rows);
  head.rows(a.qkv, 3, 1).template load<kDim>(k, rows);
  head.rows(a.qkv, 3, 2).template load<kDim>(v, rows);
  __syncthreads();

  const int warps = static_cast<int>(blockDim.x) / 32;
  for (int query = static_cast<int>(threadIdx.x) / 32 * kTile; query < rows; query += warps * kTile) {
    Values out[kDim / 8] = {};
    float greatest[2] = {Max::kIdentity, Max::kIdentity}, sum[2] = {};
#pragma unroll 1
    for (int key = 0; key < rows; key += kTile) {
      Values weights[2];
      dot_rows<kDim>(q + query * kP, k + key * kP, weights);
      float next[2] = {greatest[0], greatest[1]};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& score = weights[i / 4][i % 4];
        score = key + 8 * (i / 4) + Lane::column() + i % 2 < tokens ? score * scale : Max::kIdentity;
        next[i % 4 / 2] = Max()(score, next[i % 4 / 2]);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        next[r] = group_reduce<4>(next[r], Max());
        const float shrink = exp_float(greatest[r] - next[r]);
        greatest[r] = next[r];
        sum[r] *= shrink;
        scale_row(shrink, r, out);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& weight = weights[i / 4][i % 4];
        weight = exp_float(weight - greatest[i % 4 / 2]);
        sum[i % 4 / 2] += weight;
      }
      add_weighted_rows<kDim>(weights, v + key * kP, out);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float inverse = 1.0f / group_reduce<4>(sum[r], Sum());
      scale_row(inverse, r, out);
      const int row = query + Lane::row() + 8 * r;
      if (a.statistics != nullptr && Lane::column() == 0 && row < tokens) {
        float* to = a.statistics + 2 * (head.row() + row);
        to[0] = greatest[r];
        to[1] = inverse;
      }
    }
    head.rows(a.merged, 1, 0).store(query, out);
  }
}

// The sums per row that backward keeps in shared memory in addition to the rows.
struct RowSums {
  float *greatest, *inverse;
  float* dot;  // dot product of the row's output and its gradient

  // Computes a row's sums; called by a whole warp. `statistics`: the row's statistics from the forward pass.
  // Rows that only pad the tile get weight 0.
  template <typename S, typename Gradient>
  __device__ __forceinline__ void set(int row, const HeadRows<S>& outputs,
                                      const HeadRows<Gradient>& gradients, const float* statistics) const {
    const bool exists = row < outputs.tokens;
    float sum = 0.0f;
    if (exists) {
      for (int c = Lane::lane(); c < outputs.dim; c += 32)
        sum +=
            widen(outputs.first[row * outputs.pitch + c]) * widen(gradients.first[row * gradients.pitch + c]);
    }
    sum = group_reduce<32>(sum, Sum());
    if (Lane::lane() == 0) {
      greatest[row] = exists ? statistics[0] : 0.0f;
      inverse[row] = exists ? statistics[1] : 0.0f;
      dot[row] = sum;
    }
  }

  // Replaces an unscaled score with its weight, and the weight's gradient with the score's gradient.
  __device__ __forceinline__ void weigh(int row, float scale, float& score, float& gradient) const {
    // __fmul_rn() rounds before the subtraction, as the forward pass does; an FMA would change the weights.
    const float weight = exp_float(__fmul_rn(scale, score) - greatest[row]) * inverse[row];
    gradient = scale * weight * (gradient - dot[row]);
    score = weight;
  }
};

// Writes the sums over a warp's sixteen rows to to[0, dim).
template <int kTiles>
__device__ __forceinline__ void store_column_sums(const Values (&tiles)[kTiles], int dim, float* to) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float sum = tiles[n][j] + tiles[n][2 + j];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(kFullWarp, sum, distance);
      const int c = 8 * n + Lane::column() + j;
      if (Lane::row() == 0 && c < dim) to[c] = sum;
    }
  }
}

// The work of a thread block in the backward pass: one head, whose rows are in shared memory.
template <int kDim, typename S>
struct BackwardHead {
  static constexpr int kP = kPitch<S, kDim>;
  const AttentionBackward<S>& a;
  const Head& head;
  const RowSums& row_sums;
  float scale;
  int tokens, rows;
  const S *q, *k, *v, *d_out;

  // Computes and stores the gradients of sixteen keys and values, or of sixteen queries, and their sums in
  // partial[width, 3 width) or in partial[0, width).
  template <bool kKeys>
  __device__ __forceinline__ void differentiate(int first, float* partial) const {
    const S *const own = (kKeys ? k : q) + first * kP, *const own_outer = (kKeys ? v : d_out) + first * kP;
    Values inner[kDim / 8] = {}, outer[kDim / 8] = {};
#pragma unroll 1
    for (int at = 0; at < rows; at += kTile) {
      const S *const other = (kKeys ? q : k) + at * kP, *const other_outer = (kKeys ? d_out : v) + at * kP;
      Values weights[2], d_scores[2];
      dot_rows<kDim>(own, other, weights);
      dot_rows<kDim>(own_outer, other_outer, d_scores);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float &weight = weights[i / 4][i % 4], &d_score = d_scores[i / 4][i % 4];
        const int row = first + Lane::row() + 8 * (i % 4 / 2),
                  column = at + 8 * (i / 4) + Lane::column() + i % 2;
        row_sums.weigh(kKeys ? column : row, scale, weight, d_score);
        if ((kKeys ? row : column) >= tokens) weight = d_score = 0.0f;
      }
      if (kKeys) add_weighted_rows<kDim>(weights, other_outer, outer);
      add_weighted_rows<kDim>(d_scores, other, inner);
    }
    const int64_t width = a.heads * a.head_dim;
    const int dim = static_cast<int>(a.head_dim);
    head.rows(a.d_qkv, 3, kKeys ? 1 : 0).store(first, inner);
    store_column_sums(inner, dim, partial + (kKeys ? width : 0));
    if (!kKeys) return;
    head.rows(a.d_qkv, 3, 2).store(first, outer);
    store_column_sums(outer, dim, partial + 2 * width);
  }
};

template <int kDim, typename S>
__global__ void __launch_bounds__(kAttentionThreads, sizeof(S) == 2 ? 2 : 1)
    attention_backward_kernel(AttentionBackward<S> a, float scale, bool aligned) {
  wait_for_earlier_kernels();
  constexpr int kP = kPitch<S, kDim>;
  GW_DYNAMIC_SHARED(float, memory);
  const Head head = head_of(a, aligned);
  const int tokens = static_cast<int>(a.tokens), rows = tile_rows(a.tokens);
  const RowSums row_sums = {memory, memory + rows, memory + 2 * rows};
  S* q = reinterpret_cast<S*>(memory + 3 * rows);
  S* k = q + rows * kP;
  S* v = k + rows * kP;
  S* d_out = v + rows * kP;
  head.rows(a.qkv, 3, 0).template load<kDim>(q, rows);
  head.rows(a.qkv, 3, 1).template load<kDim>(k, rows);
  head.rows(a.qkv, 3, 2).template load<kDim>(v, rows);
  const auto gradients = head.rows(a.d_merged, 1, 0);
  gradients.template load<kDim>(d_out, rows);
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  const auto outputs = head.rows(a.merged, 1, 0);
  for (int row = warp; row < rows; row += warps)
    row_sums.set(row, outputs, gradients, a.statistics + 2 * (head.row() + row));
  __syncthreads();

  const BackwardHead<kDim, S> work{a, head, row_sums, scale, tokens, rows, q, k, v, d_out};
  const int tiles = rows / kTile;
  const int64_t width = a.heads * a.head_dim;
  for (int unit = warp; unit < 2 * tiles; unit += warps) {
    const int first = unit / 2 * kTile;
    float* partial = a.workspace + (head.image * tiles + unit / 2) * 3 * width + head.head * a.head_dim;
    if (unit % 2 == 0) {
      work.template differentiate<true>(first, partial);
    } else {
      work.template differentiate<false>(first, partial);
    }
  }
}

template <typename S>
size_t shared_bytes(int64_t tokens, int64_t head_dim, int matrices, int sums) {
  const auto rows = static_cast<size_t>(tile_rows(tokens));
  const int pitch = head_dim <= 32 ? kPitch<S, 32> : kPitch<S, 64>;
  return rows *
         (static_cast<size_t>(matrices * pitch) * sizeof(S) + static_cast<size_t>(sums) * sizeof(float));
}

// Launches a block per head, with a warp per unit of work, up to a block's maximum.
template <typename Args>
void launch_heads(const char* name, void (*for_32)(Args, float, bool), void (*for_64)(Args, float, bool),
                  CudaStream stream, const Args& a, int64_t units, size_t shared, bool aligned) {
  if (shared > max_shared_bytes() || a.head_dim > 64)
    throw BadInput(std::string(name) + ": heads do not fit into shared memory; ask fuses_attention() first");
  const LaunchConfig config{
      .grid = dim3(static_cast<unsigned>(a.batch * a.heads)),
      .block = dim3(static_cast<unsigned>(std::min<int64_t>(32 * units, kAttentionThreads))),
      .shared_bytes = shared,
      .stream = stream};
  launch(name, a.head_dim <= 32 ? for_32 : for_64, config, a, attention_scale(a.head_dim), aligned);
}

}  // namespace

template <typename S>
bool attention_fits(int64_t tokens, int64_t head_dim) {
  return head_dim <= 64 && tokens <= 1024 && shared_bytes<S>(tokens, head_dim, 4, 3) <= max_shared_bytes();
}
template bool attention_fits<float>(int64_t, int64_t);
template bool attention_fits<Bf16>(int64_t, int64_t);

template <typename S>
void attention(CudaStream stream, const Attention<S>& a) {
  if (a.batch <= 0 || a.tokens <= 0 || a.heads <= 0 || a.head_dim <= 0) return;
  if constexpr (std::is_same_v<S, Bf16>) {
    if (takes_short(a)) {
      launch_short<Attention<S>>("attention",
                                 {short_attention_kernel<1>, short_attention_kernel<2>,
                                  short_attention_kernel<3>, short_attention_kernel<4>},
                                 stream, a, 3);
      return;
    }
  }
  launch_heads("attention", attention_kernel<32, S>, attention_kernel<64, S>, stream, a,
               tile_rows(a.tokens) / kTile, shared_bytes<S>(a.tokens, a.head_dim, 3, 0),
               takes_vectors<S>(a.head_dim, a.qkv, a.merged));
}

template <typename S>
void attention_backward(CudaStream stream, const AttentionBackward<S>& a) {
  if (a.tokens <= 0 || a.heads <= 0 || a.head_dim <= 0) return;
  if constexpr (std::is_same_v<S, Bf16>) {
    if (takes_short(a, a.d_merged, a.d_qkv, a.workspace)) {
      launch_short<AttentionBackward<S>>(
          "attention_backward",
          {short_attention_backward_kernel<1>, short_attention_backward_kernel<2>,
           short_attention_backward_kernel<3>, short_attention_backward_kernel<4>},
          stream, a, 6);
      if (!a.partial_only) combine_sums(stream, {{a.sums()}});
      return;
    }
  }
  const int64_t tiles = tile_rows(a.tokens) / kTile;
  launch_heads("attention_backward", attention_backward_kernel<32, S>, attention_backward_kernel<64, S>,
               stream, a, 2 * tiles, shared_bytes<S>(a.tokens, a.head_dim, 4, 3),
               takes_vectors<S>(a.head_dim, a.qkv, a.d_merged, a.d_qkv));
  if (!a.partial_only) combine_sums(stream, {{a.sums()}});
}

GW_INSTANTIATE_CUDA_OP(attention, Attention)
GW_INSTANTIATE_CUDA_OP(attention_backward, AttentionBackward)

}  // namespace gradwire::cuda
