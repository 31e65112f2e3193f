// attention and attention_backward: a block per image and head, which holds the head's rows in shared memory.
//
// Forward: a warp takes 16 queries and walks over the keys, 16 at a time. It computes scores, their
// exponentials relative to the largest so far, and the weighted sum of values, which is rescaled when a
// larger score comes. Backward: the weights are recomputed from the largest score and 1 / sum that forward
// stored for each row. A warp takes 16 queries and walks over the keys, giving dQ, or 16 keys and walks over
// the queries, giving dK and dV. Nothing of size (T, T) is stored, and no two warps add to the same value;
// the price is that backward computes Q K^T and dO V^T twice.
//
// BF16 operands use the tensor cores (mma.sync), FP32 operands FMAs. Both hold a 16 x 8 tile of a product in
// mma's layout, so that all other code is shared. A weight is rounded to S before it multiplies, as in a
// product of stored operands.
//
// Traffic: each row of qkv, merged and their gradients once: 16 or 8 B per (b, t, c) forward, 32 or 16 B
// backward. FLOPs per head: 4 T^2 D forward, 14 T^2 D backward. With BF16 the limit is memory bandwidth, with
// FP32 the FMAs. Deterministic: sums in fixed order, no atomics.
#include <type_traits>

#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/math/exp.h"
#include "kernels/vit/attention.h"
#include "kernels/vit/bias.h"

namespace gradwire::cuda {
namespace {

constexpr int kTile = static_cast<int>(kAttentionTile);
constexpr int kAttentionThreads = 256;

// Elements between rows in shared memory: 16 bytes more than the row, so that eight rows start in different
// banks.
template <typename S, int kDim>
inline constexpr int kPitch = kDim + kVector<S>;

// The place of a lane's four values of a 16 x 8 tile: rows row() and row() + 8, columns column() and column()
// + 1. Values 0 and 1 are of the first row.
struct Lane {
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __device__ __forceinline__ int row() { return lane() / 4; }
  static __device__ __forceinline__ int column() { return lane() % 4 * 2; }
};
using Values = float[4];

// Sets c (16, 8) += a (16, 16) b (16, 8), for BF16 in registers in the layout of mma.m16n8k16.
__device__ __forceinline__ void multiply_add(Values& c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef GRADWIRE_SIMT
  const uint32_t b[2] = {b0, b1};
  for (int from = 0; from < 4;
       ++from) {  // the lane of a quad that has elements 2 from, 2 from + 1, and the same + 8
    uint32_t rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = __shfl_sync(kFullWarp, a[i], 4 * Lane::row() + from);
    for (int j = 0; j < 2; ++j) {
      for (int half = 0; half < 2; ++half) {
        const uint32_t column = __shfl_sync(kFullWarp, b[half], 4 * (Lane::column() + j) + from);
        for (int r = 0; r < 2; ++r) {
          const uint32_t row = rows[2 * half + r];
          c[2 * r + j] += bits_float(row << 16) * bits_float(column << 16);
          c[2 * r + j] += bits_float(row & 0xffff0000u) * bits_float(column & 0xffff0000u);
        }
      }
    }
  }
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// The left operand of a product of tiles: 16 rows by 16 of the inner dimension.
template <typename S>
struct Left;

template <>
struct Left<Bf16> {
  uint32_t words[4];

  // Loads rows from shared memory.
  static __device__ __forceinline__ Left load(const Bf16* from, int pitch) {
    const Bf16* at = from + Lane::row() * pitch + Lane::column();
    return {{word(at), word(at + 8 * pitch), word(at + 8), word(at + 8 * pitch + 8)}};
  }
  // Rounds two tiles of a product.
  static __device__ __forceinline__ Left of(const Values (&tiles)[2]) {
    return {{pack_bf16(tiles[0][0], tiles[0][1]), pack_bf16(tiles[0][2], tiles[0][3]),
             pack_bf16(tiles[1][0], tiles[1][1]), pack_bf16(tiles[1][2], tiles[1][3])}};
  }
  // Adds this times the transpose of eight rows in shared memory to c.
  __device__ __forceinline__ void times_transposed(const Bf16* rows, int pitch, Values& c) const {
    const Bf16* at = rows + Lane::row() * pitch + Lane::column();
    multiply_add(c, words, word(at), word(at + 8));
  }
  // Adds this times eight columns of sixteen rows in shared memory to c.
  __device__ __forceinline__ void times(const Bf16* rows, int pitch, Values& c) const {
    const Bf16* at = rows + Lane::column() * pitch + Lane::row();
    multiply_add(c, words, pair(at, pitch), pair(at + 8 * pitch, pitch));
  }

 private:
  static __device__ __forceinline__ uint32_t word(const Bf16* at) {
    return *reinterpret_cast<const uint32_t*>(at);
  }
  static __device__ __forceinline__ uint32_t pair(const Bf16* at, int pitch) {
    return at->bits | static_cast<uint32_t>(at[pitch].bits) << 16;
  }
};

template <>
struct Left<float> {
  float values[2][16];  // of the lane's rows of a tile

  static __device__ __forceinline__ Left load(const float* from, int pitch) {
    Left left;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int k = 0; k < 16; k += 4) {
        const float4 x = *reinterpret_cast<const float4*>(from + (Lane::row() + 8 * r) * pitch + k);
        left.values[r][k] = x.x, left.values[r][k + 1] = x.y, left.values[r][k + 2] = x.z,
        left.values[r][k + 3] = x.w;
      }
    }
    return left;
  }
  static __device__ __forceinline__ Left of(const Values (&tiles)[2]) {
    Left left;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int k = 0; k < 16; ++k) {
        left.values[r][k] = __shfl_sync(kFullWarp, tiles[k / 8][2 * r + k % 2], 4 * Lane::row() + k % 8 / 2);
      }
    }
    return left;
  }
  __device__ __forceinline__ void times_transposed(const float* rows, int pitch, Values& c) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int k = 0; k < 16; k += 4) {
        const float4 x = *reinterpret_cast<const float4*>(rows + (Lane::column() + j) * pitch + k);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          c[2 * r + j] += values[r][k] * x.x;
          c[2 * r + j] += values[r][k + 1] * x.y;
          c[2 * r + j] += values[r][k + 2] * x.z;
          c[2 * r + j] += values[r][k + 3] * x.w;
        }
      }
    }
  }
  __device__ __forceinline__ void times(const float* rows, int pitch, Values& c) const {
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      const float2 x = *reinterpret_cast<const float2*>(rows + k * pitch + Lane::column());
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        c[2 * r] += values[r][k] * x.x;
        c[2 * r + 1] += values[r][k] * x.y;
      }
    }
  }
};

// Multiplies sixteen rows with the transposes of sixteen others, over kDim elements, into two tiles.
template <int kDim, typename S>
__device__ __forceinline__ void dot_rows(const S* left, const S* right, Values (&tiles)[2]) {
  constexpr int kP = kPitch<S, kDim>;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) tiles[j][i] = 0.0f;
  }
#pragma unroll(std::is_same_v <S, float> ? 1 : kDim / 16)  // FP32 operands take all registers
  for (int k = 0; k < kDim; k += 16) {
    const auto rows = Left<S>::load(left + k, kP);
    rows.times_transposed(right + k, kP, tiles[0]);
    rows.times_transposed(right + 8 * kP + k, kP, tiles[1]);
  }
}

// Sets sums (16, kDim) += weights (16, 16), rounded to S, times sixteen rows.
template <int kDim, typename S>
__device__ __forceinline__ void add_weighted_rows(const Values (&weights)[2], const S* rows,
                                                  Values (&sums)[kDim / 8]) {
  const auto left = Left<S>::of(weights);
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) left.times(rows + 8 * n, kPitch<S, kDim>, sums[n]);
}

// One head's rows of one image, in global memory.
template <typename S>
struct HeadRows {
  S* first;
  int64_t pitch;
  int tokens, dim;
  bool aligned;  // 16-byte accesses are possible

  // Copies the rows to shared memory, padded with zeros to `rows` rows and kDim columns. The whole block
  // calls it.
  template <int kDim, typename To>
  __device__ __forceinline__ void load(To* to, int rows) const {
    constexpr int V = kVector<To>, kAccesses = kDim / V, kBatch = 4;
    const int threads = static_cast<int>(blockDim.x), count = rows * kAccesses;
    if (aligned) {
      for (int i = static_cast<int>(threadIdx.x); i < count; i += kBatch * threads) {
        uint4 x[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const int row = (i + j * threads) / kAccesses, c = (i + j * threads) % kAccesses * V;
          x[j] = make_uint4(0, 0, 0, 0);
          if (row < tokens && c < dim) x[j] = *reinterpret_cast<const uint4*>(first + row * pitch + c);
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const int row = (i + j * threads) / kAccesses, c = (i + j * threads) % kAccesses * V;
          if (row < rows) *reinterpret_cast<uint4*>(to + row * kPitch<To, kDim> + c) = x[j];
        }
      }
    } else {
      for (int i = static_cast<int>(threadIdx.x); i < rows * kDim; i += threads) {
        const int row = i / kDim, c = i % kDim;
        to[row * kPitch<To, kDim> + c] = row < tokens && c < dim ? first[row * pitch + c] : narrow<To>(0.0f);
      }
    }
  }

  // Writes a warp's tiles, sixteen rows from `row` on.
  template <int kTiles>
  __device__ __forceinline__ void store(int row, const Values (&tiles)[kTiles]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = row + Lane::row() + 8 * r;
      if (at >= tokens) continue;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int c = 8 * n + Lane::column();
        S* to = first + at * pitch + c;
        if (aligned) {
          if (c < dim) store_pair(to, tiles[n][2 * r], tiles[n][2 * r + 1]);
        } else {
          if (c < dim) to[0] = narrow<S>(tiles[n][2 * r]);
          if (c + 1 < dim) to[1] = narrow<S>(tiles[n][2 * r + 1]);
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ void store_pair(float* to, float x, float y) {
    *reinterpret_cast<float2*>(to) = float2{x, y};
  }
  static __device__ __forceinline__ void store_pair(Bf16* to, float x, float y) {
    *reinterpret_cast<uint32_t*>(to) = pack_bf16(x, y);
  }
};

// The place of a block's head. Arrays have `parts` matrices of width heads * head_dim side by side.
struct Head {
  int64_t image, head, heads, tokens, dim;
  bool aligned;

  template <typename S>
  __device__ __forceinline__ HeadRows<S> rows(S* array, int parts, int part) const {
    const int64_t width = heads * dim;
    return {array + (image * tokens * parts + part) * width + head * dim, parts * width,
            static_cast<int>(tokens), static_cast<int>(dim), aligned};
  }
  __device__ __forceinline__ int64_t row() const { return (image * heads + head) * tokens; }
};

template <typename Args>
__device__ __forceinline__ Head head_of(const Args& a, bool aligned) {
  return {static_cast<int64_t>(blockIdx.x) / a.heads,
          static_cast<int64_t>(blockIdx.x) % a.heads,
          a.heads,
          a.tokens,
          a.head_dim,
          aligned};
}

// Returns the number of rows in shared memory: whole tiles.
__host__ __device__ __forceinline__ int tile_rows(int64_t tokens) {
  return static_cast<int>((tokens + kTile - 1) / kTile * kTile);
}

template <int kDim, typename S>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_kernel(Attention<S> a, float scale, bool aligned) {
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
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          out[n][2 * r] *= shrink;
          out[n][2 * r + 1] *= shrink;
        }
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
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        out[n][2 * r] *= inverse;
        out[n][2 * r + 1] *= inverse;
      }
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

// The values per row that backward keeps in shared memory in addition to the rows.
struct RowSums {
  float *greatest, *inverse;
  float* dot;  // dot product of the row's output and its gradient

  // Replaces an unscaled score by its weight, and the weight's gradient by the score's gradient.
  __device__ __forceinline__ void weigh(int row, float scale, float& score, float& gradient) const {
    // Rounds before subtracting, as the forward pass does; an FMA would change the weights.
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

template <int kDim, typename S>
__global__ void __launch_bounds__(kAttentionThreads, sizeof(S) == 2 ? 2 : 1)
    attention_backward_kernel(AttentionBackward<S> a, float scale, bool aligned) {
  constexpr int kP = kPitch<S, kDim>;
  GW_DYNAMIC_SHARED(float, memory);
  const Head head = head_of(a, aligned);
  const int tokens = static_cast<int>(a.tokens), rows = tile_rows(a.tokens),
            dim = static_cast<int>(a.head_dim);
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
  for (int row = warp; row < rows; row += warps) {
    float dot = 0.0f;
    if (row < tokens) {
      for (int c = Lane::lane(); c < dim; c += 32)
        dot +=
            widen(outputs.first[row * outputs.pitch + c]) * widen(gradients.first[row * gradients.pitch + c]);
    }
    dot = group_reduce<32>(dot, Sum());
    if (Lane::lane() == 0) {
      // Rows that only pad the tile have weight 0.
      const float* from = a.statistics + 2 * (head.row() + row);
      row_sums.greatest[row] = row < tokens ? from[0] : 0.0f;
      row_sums.inverse[row] = row < tokens ? from[1] : 0.0f;
      row_sums.dot[row] = dot;
    }
  }
  __syncthreads();

  const int tiles = rows / kTile;
  const int64_t width = a.heads * a.head_dim;
  for (int unit = warp; unit < 2 * tiles; unit += warps) {
    const int first = unit / 2 * kTile;
    float* partial = a.workspace + (head.image * tiles + unit / 2) * 3 * width + head.head * a.head_dim;
    if (unit % 2 == 0) {  // sixteen keys
      Values dk[kDim / 8] = {}, dv[kDim / 8] = {};
#pragma unroll 1
      for (int query = 0; query < rows; query += kTile) {
        Values weights[2], d_scores[2];
        dot_rows<kDim>(k + first * kP, q + query * kP, weights);
        dot_rows<kDim>(v + first * kP, d_out + query * kP, d_scores);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float &weight = weights[i / 4][i % 4], &d_score = d_scores[i / 4][i % 4];
          row_sums.weigh(query + 8 * (i / 4) + Lane::column() + i % 2, scale, weight, d_score);
          if (first + Lane::row() + 8 * (i % 4 / 2) >= tokens) weight = d_score = 0.0f;
        }
        add_weighted_rows<kDim>(weights, d_out + query * kP, dv);
        add_weighted_rows<kDim>(d_scores, q + query * kP, dk);
      }
      head.rows(a.d_qkv, 3, 1).store(first, dk);
      head.rows(a.d_qkv, 3, 2).store(first, dv);
      store_column_sums(dk, dim, partial + width);
      store_column_sums(dv, dim, partial + 2 * width);
    } else {  // sixteen queries
      Values dq[kDim / 8] = {};
#pragma unroll 1
      for (int key = 0; key < rows; key += kTile) {
        Values weights[2], d_scores[2];
        dot_rows<kDim>(q + first * kP, k + key * kP, weights);
        dot_rows<kDim>(d_out + first * kP, v + key * kP, d_scores);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& d_score = d_scores[i / 4][i % 4];
          row_sums.weigh(first + Lane::row() + 8 * (i % 4 / 2), scale, weights[i / 4][i % 4], d_score);
          if (key + 8 * (i / 4) + Lane::column() + i % 2 >= tokens) d_score = 0.0f;
        }
        add_weighted_rows<kDim>(d_scores, k + key * kP, dq);
      }
      head.rows(a.d_qkv, 3, 0).store(first, dq);
      store_column_sums(dq, dim, partial);
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

// Returns the threads for `units` units of work: a warp per unit, up to a block's maximum.
unsigned threads_for(int64_t units) {
  const int64_t threads = units * 32;
  return static_cast<unsigned>(threads < kAttentionThreads ? threads : kAttentionThreads);
}

template <typename Args>
void launch_heads(const char* name, void (*for_32)(Args, float, bool), void (*for_64)(Args, float, bool),
                  CudaStream stream, const Args& a, int64_t units, size_t shared, bool aligned) {
  if (shared > most_shared_bytes() || a.head_dim > 64)
    throw BadInput(std::string(name) + ": heads do not fit into shared memory; ask fuses_attention() first");
  const LaunchConfig config{.grid = dim3(static_cast<unsigned>(a.batch * a.heads)),
                            .block = dim3(threads_for(units)),
                            .shared_bytes = shared,
                            .stream = stream};
  launch(name, a.head_dim <= 32 ? for_32 : for_64, config, a, attention_scale(a.head_dim), aligned);
}

}  // namespace

template <typename S>
bool attention_fits(int64_t tokens, int64_t head_dim) {
  return head_dim <= 64 && tokens <= 1024 && shared_bytes<S>(tokens, head_dim, 4, 3) <= most_shared_bytes();
}
template bool attention_fits<float>(int64_t, int64_t);
template bool attention_fits<Bf16>(int64_t, int64_t);

template <typename S>
void attention(CudaStream stream, const Attention<S>& a) {
  if (a.batch <= 0 || a.tokens <= 0 || a.heads <= 0 || a.head_dim <= 0) return;
  launch_heads("attention", attention_kernel<32, S>, attention_kernel<64, S>, stream, a,
               tile_rows(a.tokens) / kTile, shared_bytes<S>(a.tokens, a.head_dim, 3, 0),
               takes_vectors<S>(a.head_dim, a.qkv, a.merged));
}

template <typename S>
void attention_backward(CudaStream stream, const AttentionBackward<S>& a) {
  if (a.tokens <= 0 || a.heads <= 0 || a.head_dim <= 0) return;
  const int64_t tiles = tile_rows(a.tokens) / kTile;
  launch_heads("attention_backward", attention_backward_kernel<32, S>, attention_backward_kernel<64, S>,
               stream, a, 2 * tiles, shared_bytes<S>(a.tokens, a.head_dim, 4, 3),
               takes_vectors<S>(a.head_dim, a.qkv, a.d_merged, a.d_qkv));
  if (!a.partial_only) combine_sums(stream, {{a.sums()}});
}

GW_INSTANTIATE_CUDA_OP(attention, Attention)
GW_INSTANTIATE_CUDA_OP(attention_backward, AttentionBackward)

}  // namespace gradwire::cuda
