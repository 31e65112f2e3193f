// Tiles of 16 x 8 values in registers, their products, and the rows of a head in shared memory: the parts of
// attention's kernels (attention.cu).
//
// A warp holds a tile in the layout of mma.sync, also for FP32 operands. The same code therefore serves
// products on tensor cores and products by FMAs.
#pragma once

#include <type_traits>

#include "kernels/cuda/vector.cuh"
#include "kernels/vit/attention.h"

namespace gradwire::cuda {
namespace {

constexpr int kTile = static_cast<int>(kAttentionTile);

// The number of elements between rows in shared memory: 16 bytes more than the row, so that eight rows start
// in different banks.
template <typename S, int kDim>
inline constexpr int kPitch = kDim + kVector<S>;

// The place of a lane's four values of a 16 x 8 tile: rows row() and row() + 8, columns column() and column()
// + 1. Values 0 and 1 belong to the first row.
struct Lane {
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
  static __device__ __forceinline__ int row() { return lane() / 4; }
  static __device__ __forceinline__ int column() { return lane() % 4 * 2; }
};
using Values = float[4];

// Adds a (16, 16) b (16, 8) to c (16, 8), for BF16 in registers in the layout of mma.m16n8k16.
__device__ __forceinline__ void multiply_add(Values& c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef GRADWIRE_SIMT
  // The operands of all lanes: one thread of a block runs at a time.
  static thread_local uint32_t words[32][32][6];
  auto& lanes = words[threadIdx.x / 32];
  const uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  memcpy(lanes[Lane::lane()], mine, sizeof mine);
  __syncwarp();
  // `from` is the lane of a quad that holds elements 2 from, 2 from + 1, and these plus 8.
  for (int from = 0; from < 4; ++from) {
    for (int i = 0; i < 8; ++i) {
      const int j = i / 4, half = i / 2 % 2, r = i % 2;
      const uint32_t row = lanes[4 * Lane::row() + from][2 * half + r];
      const uint32_t column = lanes[4 * (Lane::column() + j) + from][4 + half];
      c[2 * r + j] += bits_float(row << 16) * bits_float(column << 16);
      c[2 * r + j] += bits_float(row & 0xffff0000u) * bits_float(column & 0xffff0000u);
    }
  }
  __syncwarp();
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// The left operand of a product of tiles: 16 rows by 16 elements of the inner dimension.
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
  // Returns the left operand made of two rounded tiles of a product.
  static __device__ __forceinline__ Left of(const Values (&tiles)[2]) {
    return {{pack_bf16(tiles[0][0], tiles[0][1]), pack_bf16(tiles[0][2], tiles[0][3]),
             pack_bf16(tiles[1][0], tiles[1][1]), pack_bf16(tiles[1][2], tiles[1][3])}};
  }
  // Adds the product of this operand and the transpose of eight rows in shared memory to c.
  __device__ __forceinline__ void times_transposed(const Bf16* rows, int pitch, Values& c) const {
    const Bf16* at = rows + Lane::row() * pitch + Lane::column();
    multiply_add(c, words, word(at), word(at + 8));
  }
  // Adds the product of this operand and eight columns of sixteen rows in shared memory to c.
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
  float values[2][16];  // the values in the lane's rows of a tile

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

// Multiplies sixteen rows by the transpose of sixteen other rows, over kDim elements; stores the product in
// two tiles.
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

// Adds the product of weights (16, 16), rounded to S, and sixteen rows to sums (16, kDim).
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
  bool aligned;  // true: 16-byte accesses are possible

  // Copies the rows to shared memory, padded with zeros to `rows` rows and kDim columns. Called by the whole
  // block.
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

  // Writes a warp's tiles: sixteen rows, starting at `row`.
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
        const float x = tiles[n][2 * r], y = tiles[n][2 * r + 1];
        if (!aligned) {
          if (c < dim) to[0] = narrow<S>(x);
          if (c + 1 < dim) to[1] = narrow<S>(y);
        } else if (c < dim) {
          if constexpr (std::is_same_v<S, Bf16>)
            *reinterpret_cast<uint32_t*>(to) = pack_bf16(x, y);
          else
            *reinterpret_cast<float2*>(to) = float2{x, y};
        }
      }
    }
  }
};

// The place of a block's head. Arrays hold `parts` matrices of width heads * head_dim, side by side.
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

// Returns the number of rows in shared memory: `tokens` rounded up to whole tiles.
__host__ __device__ __forceinline__ int tile_rows(int64_t tokens) {
  return static_cast<int>((tokens + kTile - 1) / kTile * kTile);
}

}  // namespace
}  // namespace gradwire::cuda
