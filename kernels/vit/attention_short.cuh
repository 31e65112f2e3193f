// Attention in BF16 for heads of 64 elements and at most 64 tokens: a block per head, a warp per 16 queries,
// whole rows of scores in registers. attention.cu launches these kernels.
//
// All rows of a head arrive by asynchronous copies: those of the scores first, the others while they are
// computed. Backward computes five products of (T, T, D): the warps exchange the weights and the gradients of
// the scores, rounded to BF16, in shared memory. Both directions compute weights by exponential(), from the
// same scores and the same largest score.
//
// d_bias: the weights of a query add up to 1, and the gradients of its scores to 0. So the sum over keys of
// dV is the sum over queries of d_merged, and that of dK is 0.
#pragma once

#include "kernels/cuda/copies.cuh"
#include "kernels/math/gelu.h"
#include "kernels/vit/attention.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kShortDim = 64, kShortTiles = 4;  // elements of a head, and most tiles of tokens
constexpr int kRowBytes = kShortDim * 2, kTileBytes = kTile * kRowBytes, kSteps = kShortDim / kTile;
using Bytes = unsigned char;
using Words = uint32_t[4];  // sixteen rows of sixteen BF16 values, in the layout of mma's left operand

// Returns the place of eight elements of a row in a matrix in shared memory. The order within a row depends
// on the row, so that eight rows at one column lie in different banks.
__device__ __forceinline__ int place_of(int row, int eighth) {
  return row * kRowBytes + (eighth ^ row % 8) * 16;
}

// Rounds tiles to words in the layout of mma's left operands.
template <int kTiles>
__device__ __forceinline__ void round_tiles(const Values (&tiles)[2 * kTiles], Words (&words)[kTiles]) {
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) {
    const Values& tile = tiles[i / 2];
    words[i / 4][i % 4] = pack_bf16(tile[i % 2 * 2], tile[i % 2 * 2 + 1]);
  }
}

// A head: its rows in global memory, and its matrices of 16 kTiles rows in shared memory, which have numbers.
template <int kTiles>
struct ShortHead {
  static constexpr int kMatrixBytes = kTiles * kTileBytes;
  using Scores = Values[2 * kTiles];
  using Rows = Values[2 * kSteps];

  int warp = static_cast<int>(threadIdx.x / 32);
  uint32_t row, statistics;  // the warp's first row of (B, T) and of (B, H, T)
  int tokens;                // from the warp's first row on
  Bytes *memory, *own;       // the first matrix, and the warp's rows of it
  // A lane copies parts of a warp's rows, of eight elements of every fourth row. Part i of a matrix is 4 i
  // rows after copied[i % 2].
  Bytes* copied[2];
  // The lane's row of the four 8 x 8 matrices of a tile's first sixteen columns: one below the other first,
  // or side by side first.
  int below = place_of(Lane::lane() % 16, Lane::lane() / 16);
  int beside = place_of(Lane::lane() % 8 + Lane::lane() / 16 * 8, Lane::lane() / 8 % 2);

  template <typename Args>
  __device__ __forceinline__ ShortHead(const Args& a, void* shared)
      : memory(static_cast<Bytes*>(shared)), own(memory + warp * kTileBytes) {
    const auto all = static_cast<uint32_t>(a.tokens), first = static_cast<uint32_t>(warp * kTile);
    row = blockIdx.y * all + first;
    statistics = (blockIdx.y * gridDim.x + blockIdx.x) * all + first;
    tokens = static_cast<int>(all - first);
    const int place = place_of(Lane::lane() / 8, Lane::lane() % 8);
    copied[0] = own + place, copied[1] = own + (place ^ 64);
  }

  // Returns the place 16 n columns to the right of a place in the first columns.
  static __device__ __forceinline__ int columns(int place, int n) { return place ^ n * 32; }
  __device__ __forceinline__ Bytes* copy(int matrix, int i) const {
    return copied[i % 2] + (matrix * kMatrixBytes + 4 * i * kRowBytes);
  }
  __device__ __forceinline__ Bytes* tile(int matrix, int j) const {
    return memory + (matrix * kMatrixBytes + j * kTileBytes);
  }
  // Returns whether the rows of the lane's part i exist.
  __device__ __forceinline__ bool exists(int i) const { return 4 * i + Lane::lane() / 8 < tokens; }
  // Returns the lane's part i of matrix `part` of the `parts` matrices that lie side by side in an array.
  template <typename S>
  __device__ __forceinline__ S* global(S* array, uint32_t parts, uint32_t part, uint32_t i) const {
    const uint32_t heads = gridDim.x, pitch = parts * heads * kShortDim;
    S* first =
        array + (uint64_t{row + Lane::lane() / 8} * pitch + (blockIdx.x * kShortDim + Lane::lane() % 8 * 8));
#ifndef GRADWIRE_SIMT
    asm("" : "+l"(first));  // the compiler would share offsets of arrays, which takes registers
#endif
    return first + uint64_t{heads} * ((4 * i * parts + part) * kShortDim);
  }

  // Starts to copy the warp's rows to a matrix.
  __device__ __forceinline__ void load(const Bf16* array, uint32_t parts, uint32_t part, int matrix) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) copy_async<16>(copy(matrix, i), global(array, parts, part, i), exists(i));
  }
  // Writes the warp's rows to global memory, by way of a matrix.
  __device__ __forceinline__ void store(const Words (&words)[kSteps], Bf16* array, uint32_t parts,
                                        uint32_t part, int matrix) const {
    __syncwarp();
    put(words, matrix);
    __syncwarp();
    uint4 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = *reinterpret_cast<const uint4*>(copy(matrix, i));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (exists(i)) __stwb(reinterpret_cast<uint4*>(global(array, parts, part, i)), x[i]);
    }
  }

  // Loads the warp's rows of a matrix. `place`: `below` for left operands.
  __device__ __forceinline__ void take(int matrix, int place, Words (&words)[kSteps]) const {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) load_matrices(own + matrix * kMatrixBytes + columns(place, k), words[k]);
  }
  // Stores the warp's rows of a matrix: kWords times sixteen columns.
  template <int kWords>
  __device__ __forceinline__ void put(const Words (&words)[kWords], int matrix) const {
#pragma unroll
    for (int k = 0; k < kWords; ++k)
      store_matrices(own + matrix * kMatrixBytes + columns(below, k), words[k]);
  }

  // Adds the product of `left` (16, 64) and the transpose of a matrix to `out`.
  __device__ __forceinline__ void multiply_transposed(const Words (&left)[kSteps], int matrix,
                                                      Scores& out) const {
#pragma unroll
    for (int i = 0; i < kTiles * kSteps; ++i) {
      const int j = i / kSteps, k = i % kSteps;
      Words right;
      load_matrices(tile(matrix, j) + columns(beside, k), right);
      multiply_add(out[2 * j], left[k], right[0], right[1]);
      multiply_add(out[2 * j + 1], left[k], right[2], right[3]);
    }
  }
  // Adds the product of `left` (16, 16) and sixteen columns of tile j of a matrix to two tiles.
  __device__ __forceinline__ void multiply_tile(const Words& left, int matrix, int j, int n, Values& first,
                                                Values& second) const {
    Words right;
    load_matrices<true>(tile(matrix, j) + columns(below, n), right);
    multiply_add(first, left, right[0], right[1]);
    multiply_add(second, left, right[2], right[3]);
  }
  // Adds the product of `left` (16, 16 kTiles) and a matrix to `out`.
  __device__ __forceinline__ void multiply(const Words (&left)[kTiles], int matrix, Rows& out) const {
#pragma unroll
    for (int i = 0; i < kTiles * kSteps; ++i) {
      const int j = i / kSteps, n = i % kSteps;
      multiply_tile(left[j], matrix, j, n, out[2 * n], out[2 * n + 1]);
    }
  }

  // Computes the scores of the warp's queries. The scores of keys that do not exist are -infinity.
  __device__ __forceinline__ void score(int q, int k, int keys, Scores& scores) const {
    Words left[kSteps];
    take(q, below, left);
    multiply_transposed(left, k, scores);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int n = 2 * kTiles - 2 + i / 4;
      if (8 * n + i % 2 >= keys - Lane::column()) scores[n][i % 4] = Max::kIdentity;
    }
  }
};

constexpr float kLog2E = 1.44269504f;
constexpr float kShortScale = 0.125f;  // attention_scale(kShortDim)

// Returns exp(kShortScale * score - greatest). The rounding of the second product scales all exponentials of
// a row alike, and keeps them finite for scores up to 1e9.
__device__ __forceinline__ float exponential(float score, float greatest) {
  return exp2_estimate(fmaf(score, kShortScale * kLog2E, -__fmul_rn(greatest, kLog2E)));
}

template <int kTiles>
__global__ void __launch_bounds__(32 * kTiles) short_attention_kernel(Attention<Bf16> a) {
  wait_for_earlier_kernels();
  constexpr int kQ = 0, kK = 1, kV = 2;
  GW_DYNAMIC_SHARED(float, memory);
  const ShortHead<kTiles> head(a, memory);
  head.load(a.qkv, 3, 0, kQ);
  head.load(a.qkv, 3, 1, kK);
  end_copies();
  head.load(a.qkv, 3, 2, kV);
  end_copies();
  wait_for_copies<1>();
  __syncthreads();

  Values weights[2 * kTiles] = {}, out[2 * kSteps] = {};
  head.score(kQ, kK, static_cast<int>(a.tokens), weights);
  float greatest[2] = {Max::kIdentity, Max::kIdentity}, inverse[2] = {};
#pragma unroll
  for (int i = 0; i < 8 * kTiles; ++i)
    greatest[i % 4 / 2] = fmaxf(greatest[i % 4 / 2], weights[i / 4][i % 4]);
#pragma unroll
  for (float& row : greatest)
    row = kShortScale * group_reduce<4>(row, [](float x, float y) { return fmaxf(x, y); });
#pragma unroll
  for (int i = 0; i < 8 * kTiles; ++i) {
    float& weight = weights[i / 4][i % 4];
    weight = exponential(weight, greatest[i % 4 / 2]);
    inverse[i % 4 / 2] += weight;
  }
  Words left[kTiles], words[kSteps];
  round_tiles(weights, left);
  wait_for_copies<0>();
  __syncthreads();
  head.multiply(left, kV, out);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    inverse[r] = reciprocal_estimate(group_reduce<4>(inverse[r], Sum()));
    const int row = Lane::row() + 8 * r;
    if (a.statistics != nullptr && Lane::column() == 0 && row < head.tokens)
      reinterpret_cast<float2*>(a.statistics)[head.statistics + row] = float2{greatest[r], inverse[r]};
  }
#pragma unroll
  for (int i = 0; i < 8 * kSteps; ++i) out[i / 4][i % 4] *= inverse[i % 4 / 2];
  round_tiles(out, words);
  head.store(words, a.merged, 1, 0, kQ);
}

// Returns the sums over sixteen rows of columns 8 Lane::row() + Lane::column() and the next. Each of
// three exchanges halves the columns of a lane.
__device__ __forceinline__ float2 column_sums(const Values (&tiles)[2 * kSteps]) {
  float sums[4 * kSteps];
#pragma unroll
  for (int i = 0; i < 4 * kSteps; ++i) sums[i] = tiles[i / 2][i % 2] + tiles[i / 2][i % 2 + 2];
#pragma unroll
  for (int exchange = 0; exchange < 3; ++exchange) {
    const int count = 8 >> exchange;
    const bool upper = (Lane::lane() & 2 * count) != 0;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      if (i >= count) continue;
      const float kept = upper ? sums[i + count] : sums[i], sent = upper ? sums[i] : sums[i + count];
      sums[i] = kept + __shfl_xor_sync(kFullWarp, sent, 2 * count);
    }
  }
  return {sums[0], sums[1]};
}

// Returns the lane's two of the dot products of corresponding rows of two left operands: of rows
// Lane::row() and Lane::row() + 8. They are the diagonal of a product.
__device__ __forceinline__ float2 row_dots(const Words (&a)[kSteps], const Words (&b)[kSteps]) {
  Values tiles[2] = {};
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    multiply_add(tiles[0], a[k], b[k][0], b[k][1]);
    multiply_add(tiles[1], a[k], b[k][2], b[k][3]);
  }
  const bool odd = Lane::row() % 2 != 0;
  const int from = 4 * Lane::row() + Lane::row() / 2;
  return {__shfl_sync(kFullWarp, odd ? tiles[0][1] : tiles[0][0], from),
          __shfl_sync(kFullWarp, odd ? tiles[1][3] : tiles[1][2], from)};
}

// Writes the sums of the gradients' columns over the warp's tile to the tile's row of partial sums. Those of
// the values are of all queries, for the sixteen columns of one tile each; see the top of this file.
template <int kTiles>
__device__ __forceinline__ void store_partial_sums(const AttentionBackward<Bf16>& a,
                                                   const ShortHead<kTiles>& head, int d_out,
                                                   const Values (&dq)[2 * kSteps]) {
  constexpr Words kOnes = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
  float2 sums = {};
#pragma unroll
  for (int i = 0; i < kSteps; i += kTiles) {
    const int n = head.warp + i;
    if (kSteps % kTiles != 0 && n >= kSteps) continue;
    Values tiles[2] = {};
#pragma unroll
    for (int j = 0; j < kTiles; ++j) head.multiply_tile(kOnes, d_out, j, n, tiles[0], tiles[1]);
    if (Lane::row() == 2 * n) sums = float2{tiles[0][0], tiles[0][1]};
    if (Lane::row() == 2 * n + 1) sums = float2{tiles[1][0], tiles[1][1]};
  }
  const uint32_t width = gridDim.x * kShortDim;
  float* const partial = a.workspace + uint64_t{blockIdx.y * kTiles + head.warp} * (3 * width) +
                         blockIdx.x * kShortDim + 2 * Lane::lane();
  *reinterpret_cast<float2*>(partial) = column_sums(dq);
  *reinterpret_cast<float2*>(partial + width) = float2{};
  *reinterpret_cast<float2*>(partial + 2 * width) = sums;
}

template <int kTiles>
__global__ void __launch_bounds__(32 * kTiles, 16 / kTiles)
    short_attention_backward_kernel(AttentionBackward<Bf16> a) {
  wait_for_earlier_kernels();
  constexpr int kQ = 0, kK = 1, kV = 2, kDOut = 3, kOut = 4, kWeights = kOut, kDScores = 5;
  GW_DYNAMIC_SHARED(float, memory);
  const ShortHead<kTiles> head(a, memory);
  head.load(a.qkv, 3, 0, kQ);
  head.load(a.qkv, 3, 1, kK);
  end_copies();
  head.load(a.qkv, 3, 2, kV);
  head.load(a.d_merged, 1, 0, kDOut);
  head.load(a.merged, 1, 0, kOut);
  float2 statistics[2] = {};  // weights of rows that do not exist are 0
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = Lane::row() + 8 * r;
    if (row < head.tokens)
      statistics[r] = reinterpret_cast<const float2*>(a.statistics)[head.statistics + row];
  }
  end_copies();
  wait_for_copies<1>();
  __syncthreads();

  Values weights[2 * kTiles] = {}, d_scores[2 * kTiles], dq[2 * kSteps] = {};
  Words left[kSteps], other[kSteps], words[kTiles];
  head.score(kQ, kK, static_cast<int>(a.tokens), weights);
#pragma unroll
  for (int i = 0; i < 8 * kTiles; ++i) {
    float& weight = weights[i / 4][i % 4];
    weight = exponential(weight, statistics[i % 4 / 2].x) * statistics[i % 4 / 2].y;
  }
  wait_for_copies<0>();
  __syncthreads();
  head.take(kDOut, head.below, left);
  head.take(kOut, head.beside, other);
  const float2 dots = row_dots(left, other);
  round_tiles(weights, words);
  __syncwarp();  // the weights replace the outputs
  head.put(words, kWeights);
#pragma unroll
  for (int i = 0; i < 8 * kTiles; ++i) d_scores[i / 4][i % 4] = i % 4 < 2 ? -dots.x : -dots.y;
  head.multiply_transposed(left, kV, d_scores);
#pragma unroll
  for (int i = 0; i < 8 * kTiles; ++i) d_scores[i / 4][i % 4] *= weights[i / 4][i % 4] * kShortScale;
  round_tiles(d_scores, words);
  head.put(words, kDScores);
  head.multiply(words, kK, dq);
  store_partial_sums(a, head, kDOut, dq);
  round_tiles(dq, left);
  __syncthreads();  // all warps have put their rows, and have read the values

  head.store(left, a.d_qkv, 3, 0, kV);
#pragma unroll
  for (int part = 1; part < 3; ++part) {
    const int matrix = part == 1 ? kDScores : kWeights;
    Values sums[2 * kSteps] = {};
#pragma unroll
    for (int i = 0; i < kTiles * kSteps; ++i) {
      const int j = i / kSteps, n = i % kSteps;
      if (n == 0) load_matrices<true>(head.tile(matrix, j) + head.columns(head.beside, head.warp), words[j]);
      head.multiply_tile(words[j], part == 1 ? kQ : kDOut, j, n, sums[2 * n], sums[2 * n + 1]);
    }
    round_tiles(sums, left);
    head.store(left, a.d_qkv, 3, part, kV);
  }
}

// Launches the kernel for the number of tiles: a block per head.
template <typename Args>
void launch_short(const char* name, void (*const (&kernels)[kShortTiles])(Args), CudaStream stream,
                  const Args& a, int matrices) {
  const int tiles = tile_rows(a.tokens) / kTile;
  const LaunchConfig config{.grid = dim3(static_cast<unsigned>(a.heads), static_cast<unsigned>(a.batch)),
                            .block = dim3(static_cast<unsigned>(32 * tiles)),
                            .shared_bytes = static_cast<size_t>(matrices * tiles * kTileBytes),
                            .stream = stream};
  launch(name, kernels[tiles - 1], config, a);
}

// Returns whether the kernels for short sequences take these arguments.
template <typename Args, typename... Pointers>
bool takes_short(const Args& a, Pointers... pointers) {
  return a.head_dim == kShortDim && a.tokens <= kShortTiles * kTile && a.batch <= 65535 &&
         aligned(a.qkv, a.merged, a.statistics, pointers...);
}

}  // namespace
}  // namespace gradwire::cuda
