// Block formats (kernels/wire/block.h) on CUDA: a warp per block, or a thread block per block where blocks
// are long. Encoded values move in tiles of whole blocks through shared memory, in 16-byte pieces.
#pragma once

#include <cstddef>

#include "kernels/cuda/vector.cuh"
#include "kernels/math/random.h"
#include "kernels/wire/block.h"
#include "kernels/wire/block_formats.h"
#include "kernels/wire/block_lanes.cuh"
#include "kernels/wire/format.h"

namespace gradwire::cuda {
namespace {  // internal to each file: the shim finds only the shared variables of internal functions

// The layout of a thread block's current tile in dynamic shared memory:
//   float sums[blocks][block]; float values[teams][block]; uint8_t bytes[...]
// `bytes` has the same offset from a 16-byte boundary as the tile in the wire, so that blocks of any length
// move in 16-byte pieces.
struct TileShape {
  int blocks, block, bytes, teams;
};

// Random bits of the elements of a block from `first` on, drawn when used. A key serves 2^32 elements, so a
// block has one or two.
struct BlockRandom {
  RoundingKey key, next;
  uint32_t first;
  bool drawn;  // false: rounds to nearest
  __device__ __forceinline__ BlockRandom(const RoundingBits& draws, int64_t first_element, int block,
                                         bool draw)
      : key(draws.key_of(static_cast<uint64_t>(first_element))),
        next(draws.key_of(static_cast<uint64_t>(first_element + block - 1))),
        first(static_cast<uint32_t>(first_element)),
        drawn(draw) {}
  __device__ __forceinline__ uint32_t operator[](int i) const {
    const uint32_t element = first + static_cast<uint32_t>(i);
    const uint32_t word = rounding_word(element < first ? next : key, rounding_word_of(element));
    return (word >> rounding_shift_of(element)) & 0xffffu;
  }
  __device__ __forceinline__ bool operator!=(std::nullptr_t) const { return drawn; }
};

__device__ __forceinline__ RoundingBits draws_of(const ReduceEncode& a) {
  return {a.rounding.seed, step_of(a.rounding), static_cast<uint64_t>(a.rounding.first_element)};
}

// Calls body() for each tile of this thread block.
template <typename W, typename Body>
__device__ __forceinline__ void for_tiles(W& w, const Body& body) {
  const int64_t all = w.coder.blocks(w.count), stride = int64_t{gridDim.x} * w.shape.blocks;
  for (int64_t first = int64_t{blockIdx.x} * w.shape.blocks; first < all; first += stride) {
    w.begin_tile(first, all);
    body();
  }
}

// Adds own + residual to W sums of a thread; load_values(from, x) loads the thread's values.
template <int W, typename Load>
__device__ __forceinline__ void add_own(const ReduceEncode& a, const Load& load_values, float (&sums)[W]) {
  float own[W] = {}, kept[W] = {};
  load_values(a.own, own);
  if (a.residual != nullptr) {
    load_values(a.residual, kept);
    add<W>(a.residual_scale, kept, own);
  }
  add<W>(a.own_scale, own, sums);
}

// Writes the residuals and the results of W sums, whose encoding decodes to `sent`; store_values(to, x)
// stores the thread's values.
template <int W, typename Store>
__device__ __forceinline__ void finish(const ReduceEncode& a, bool far, const float (&sums)[W],
                                       float (&sent)[W], const Store& store_values) {
  if (a.residual != nullptr) {
    float left[W] = {};
    if (a.wire != nullptr) to_residuals(sums, sent, residual_unit(a), far, left);
    store_values(a.residual, left);
  }
  if (a.out != nullptr) {
#pragma unroll
    for (int k = 0; k < W; ++k) sent[k] *= a.out_scale;
    store_values(a.out, sent);
  }
}

// A thread block's current tile, and its bytes in shared memory.
template <typename F>
struct Worker {
  using Lanes = LanesFor<F>;
  const TileShape& shape;
  const BlockCoder<F>& coder;
  Lanes lanes;
  int64_t count;         // values of the whole call
  bool wide;             // floats are 16-byte aligned
  float *sums, *values;  // sums: of the tile; values: last decoded by the team
  uint8_t* memory;       // room for the tile's bytes
  int64_t first_block = 0;
  int blocks = 0;            // number of blocks in the tile
  uint8_t* bytes = nullptr;  // the tile's bytes, in `memory`

  static TileShape shape_of(const BlockCoder<F>& coder) {
    constexpr int kValues = 2048;
    const int enough = kValues / coder.block();
    return {.blocks = enough > Lanes::kTeams ? enough : Lanes::kTeams,
            .block = coder.block(),
            .bytes = coder.bytes(),
            .teams = Lanes::kTeams};
  }
  static size_t shared_bytes(const TileShape& shape) {
    return static_cast<size_t>((shape.blocks + shape.teams) * shape.block * 4 + shape.blocks * shape.bytes +
                               32);
  }

  __device__ __forceinline__ Worker(const BlockCoder<F>& its_coder, const TileShape& its_shape,
                                    int64_t its_count, bool is_wide, unsigned char* shared)
      : shape(its_shape),
        coder(its_coder),
        lanes(make_lanes(static_cast<const Lanes*>(nullptr))),
        count(its_count),
        wide(is_wide) {
    const int block = shape.block;
    sums = reinterpret_cast<float*>(shared);
    values = sums + (shape.blocks + lanes.team) * block;
    memory = reinterpret_cast<uint8_t*>(sums + (shape.blocks + shape.teams) * block);
  }
  // Begins the tile at block `first` of `all`.
  __device__ __forceinline__ void begin_tile(int64_t first, int64_t all) {
    first_block = first;
    blocks = all - first < shape.blocks ? static_cast<int>(all - first) : shape.blocks;
    bytes = memory + static_cast<int>(first * shape.bytes % 16);
  }
  __device__ __forceinline__ int values_of(int block) const {
    const int64_t left = count - first_value(block);
    return left < shape.block ? static_cast<int>(left) : shape.block;
  }
  // Copies the tile's bytes; called by all threads of the block. `to` and `from` have the same offset from a
  // 16-byte boundary.
  __device__ __forceinline__ void move_bytes(uint8_t* to, const uint8_t* from) const {
    const int all = blocks * shape.bytes, skew = static_cast<int>(first_block * shape.bytes % 16);
    const int head = skew == 0 ? 0 : (16 - skew < all ? 16 - skew : all), whole = (all - head) / 16;
    __syncthreads();  // the earlier bytes are no longer in use; all threads have written the new bytes
                      // Unrolling costs registers, and a thread copies at most a few pieces.
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < head; i += kBlockThreads) to[i] = from[i];
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < whole; i += kBlockThreads) {
      reinterpret_cast<uint4*>(to + head)[i] = reinterpret_cast<const uint4*>(from + head)[i];
    }
#pragma unroll 1
    for (int i = head + 16 * whole + static_cast<int>(threadIdx.x); i < all; i += kBlockThreads)
      to[i] = from[i];
    __syncthreads();
  }
  // Returns the address of the tile's bytes in shared memory.
  __device__ __forceinline__ const uint8_t* fetch(const void* wire) const {
    move_bytes(bytes, static_cast<const uint8_t*>(wire) + first_block * shape.bytes);
    return bytes;
  }
  __device__ __forceinline__ void put(void* wire) const {
    move_bytes(static_cast<uint8_t*>(wire) + first_block * shape.bytes, bytes);
  }
  __device__ __forceinline__ int64_t first_value(int block) const {
    return (first_block + block) * shape.block;
  }
  // Calls body(width, i) so that each call covers `width` adjacent values of the block. The two widths have
  // separate loops; in one loop the compiler merges them into scalar stores.
  template <typename Body>
  __device__ __forceinline__ void for_values(int block, const Body& body) const {
    [[maybe_unused]] constexpr int kUnroll = Lanes::kTeams == 1 ? 2 : 1;
    const int valid = values_of(block);
    if (wide && valid == shape.block) {
#pragma unroll kUnroll  // more spills; blocks of a warp mostly take one iteration
      for (int i = 4 * lanes.lane; i < valid; i += 4 * Lanes::kSize)
        body(std::integral_constant<int, 4>(), i);
    } else {
      for (int i = lanes.lane; i < valid; i += Lanes::kSize) body(std::integral_constant<int, 1>(), i);
    }
    lanes.sync();
  }

  // Decodes block `block` of the tile at `from` into the team's buffer, and returns the buffer.
  __device__ __forceinline__ const float* decode(const uint8_t* from, int block) const {
    coder.decode(lanes, from + block * shape.bytes, values_of(block), values);
    lanes.sync();
    return values;
  }
};

template <typename F>
__device__ __forceinline__ void reduce_encode_tile(const Worker<F>& w, const ReduceEncode& a,
                                                   const RoundingBits& draws) {
  const int n = w.shape.block, first = w.lanes.team, teams = w.shape.teams;
  for (int block = first; block < w.blocks; block += teams) {
    const int valid = w.values_of(block);
    float* const sums = w.sums + block * n;
    // -0 is the additive identity, also for -0. Past the end of the array, encode sees 0.
    w.lanes.each(n, [=](int i) { sums[i] = i < valid ? -0.0f : 0.0f; });
  }
  for (int term = 0; term <= a.num_inputs; ++term) {
    if (term == a.own_position) {
      for (int block = first; block < w.blocks; block += teams) {
        w.for_values(block, [&](auto width, int i) {
          constexpr int W = decltype(width)::value;
          float s[W], *const at = w.sums + block * n + i;
          load<W>(at, s);
          add_own(
              a, [&](const float* from, float(&x)[W]) { load<W>(from + w.first_value(block) + i, x); }, s);
          store<W>(at, s);
        });
      }
      continue;
    }
    const int input = term < a.own_position ? term : term - 1;
    const float scale = a.input_scale(input);
    const uint8_t* const bytes = w.fetch(a.inputs[input]);
    for (int block = first; block < w.blocks; block += teams) {
      const float* const x = w.decode(bytes, block);
      float* const sums = w.sums + block * n;
      w.lanes.each(w.values_of(block), [=](int i) { sums[i] = fmaf(scale, x[i], sums[i]); });
    }
  }
  for (int block = first; block < w.blocks; block += teams) {
    const float *const sums = w.sums + block * n, *sent = sums;
    if (a.wire != nullptr) {
      const BlockRandom random(draws, a.rounding.first_element + w.first_value(block), n,
                               a.rounding.mode == Rounding::stochastic);
      w.coder.encode(w.lanes, sums, w.values_of(block), random, w.bytes + block * w.shape.bytes, w.values);
      w.lanes.sync();
      sent = w.decode(w.bytes, block);
    }
    w.for_values(block, [&](auto width, int i) {
      constexpr int W = decltype(width)::value;
      float s[W], x[W];
      load<W>(sums + i, s);
      load<W>(sent + i, x);
      finish(a, w.coder.far(), s, x,
             [&](float* to, const float(&from)[W]) { store_wide<W>(to + w.first_value(block) + i, from); });
    });
  }
  if (a.wire != nullptr) w.put(a.wire);
}

template <typename F>
__device__ __forceinline__ void reduce_encode_tiles(Worker<F>& w, const ReduceEncode& a) {
  const RoundingBits draws = draws_of(a);
  for_tiles(w, [&] { reduce_encode_tile(w, a, draws); });
}

template <typename F>
__device__ __forceinline__ void decode_tiles(Worker<F>& w, const Decode& a) {
  for_tiles(w, [&] {
    const uint8_t* const bytes = w.fetch(a.wire);
    for (int block = w.lanes.team; block < w.blocks; block += w.shape.teams) {
      const float* const values = w.decode(bytes, block);
      w.for_values(block, [&](auto width, int i) {
        constexpr int W = decltype(width)::value;
        float x[W];
        const int64_t element = w.first_value(block) + i;
        load<W>(values + i, x);
        forget_not_finite<W>(x, a.residual == nullptr ? nullptr : a.residual + element);
#pragma unroll
        for (int k = 0; k < W; ++k) x[k] *= a.scale;
        store_wide<W>(a.out + element, x);
      });
    }
  });
}

}  // namespace
}  // namespace gradwire::cuda
