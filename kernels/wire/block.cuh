// Block formats (kernels/wire/block.h) on CUDA: a warp per block, or a thread block per block where blocks
// are long. Encoded values move in tiles of whole blocks through shared memory, in 16-byte pieces.
#pragma once

#include "kernels/cuda/vector.cuh"
#include "kernels/math/random.h"
#include "kernels/wire/block.h"
#include "kernels/wire/block_formats.h"
#include "kernels/wire/block_lanes.cuh"
#include "kernels/wire/format.h"

namespace gradwire::cuda {
namespace {  // internal to each file: the shim finds only the shared variables of internal functions

// The layout of a thread block's current tile in dynamic shared memory:
//   float sums[blocks][block]; float values[teams][block]; uint16_t random[teams][block]; uint8_t bytes[...]
// `bytes` has the same offset from a 16-byte boundary as the tile in the wire, so that blocks of any length
// move in 16-byte pieces.
struct TileShape {
  int blocks, block, bytes, teams;
  __host__ __device__ size_t shared_bytes() const {
    return static_cast<size_t>(blocks + teams) * static_cast<size_t>(block) * 4 +
           static_cast<size_t>(teams) * static_cast<size_t>(block) * 2 +
           static_cast<size_t>(blocks) * static_cast<size_t>(bytes) + 32;
  }
};

template <typename F>
TileShape shape_of(const BlockCoder<F>& coder) {
  constexpr int kTeams = LanesFor<F>::kTeams, kValues = 2048;
  const int enough = kValues / coder.block();
  return {.blocks = enough > kTeams ? enough : kTeams,
          .block = coder.block(),
          .bytes = coder.bytes(),
          .teams = kTeams};
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
  uint16_t* random;      // the team's random bits
  uint8_t* memory;       // room for the tile's bytes
  int64_t first_block = 0;
  int blocks = 0;            // number of blocks in the tile
  uint8_t* bytes = nullptr;  // the tile's bytes, in `memory`

  __device__ __forceinline__ Worker(const BlockCoder<F>& its_coder, const TileShape& its_shape,
                                    int64_t its_count, bool is_wide, unsigned char* shared)
      : shape(its_shape),
        coder(its_coder),
        lanes(make_lanes(static_cast<const Lanes*>(nullptr))),
        count(its_count),
        wide(is_wide) {
    const int block = shape.block;
    sums = reinterpret_cast<float*>(shared);
    float* const all_values = sums + shape.blocks * block;
    values = all_values + lanes.team * block;
    auto* const all_random = reinterpret_cast<uint16_t*>(all_values + shape.teams * block);
    random = all_random + lanes.team * block;
    memory = reinterpret_cast<uint8_t*>(all_random + shape.teams * block);
  }
  // Begins the tile at block `first` of `all`.
  __device__ __forceinline__ void begin_tile(int64_t first, int64_t all) {
    first_block = first;
    blocks = all - first < shape.blocks ? static_cast<int>(all - first) : shape.blocks;
    bytes = memory + static_cast<int>(first * shape.bytes % 16);
  }
  __device__ __forceinline__ int values_of(int block) const {
    const int64_t left = count - (first_block + block) * shape.block;
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
__device__ __forceinline__ void add_own(const Worker<F>& w, const ReduceEncode& a, int block) {
  w.for_values(block, [&](auto width, int i) {
    constexpr int W = decltype(width)::value;
    float own[W];
    const int64_t element = (w.first_block + block) * w.shape.block + i;
    load<W>(a.own + element, own);
    if (a.residual != nullptr) {
      float kept[W];
      load<W>(a.residual + element, kept);
      add<W>(a.residual_scale, kept, own);
    }
    float s[W];
    load<W>(w.sums + block * w.shape.block + i, s);
    add<W>(a.own_scale, own, s);
    store<W>(w.sums + block * w.shape.block + i, s);
  });
}

// Writes the residual and the result of a block whose encoding decodes to `sent`; null: nothing is encoded.
template <typename F>
__device__ __forceinline__ void finish(const Worker<F>& w, const ReduceEncode& a, int block,
                                       const float* sent) {
  w.for_values(block, [&](auto width, int i) {
    constexpr int W = decltype(width)::value;
    float s[W], x[W];
    const int64_t element = (w.first_block + block) * w.shape.block + i;
    load<W>(w.sums + block * w.shape.block + i, s);
    load<W>(sent == nullptr ? w.sums + block * w.shape.block + i : sent + i, x);
    if (a.residual != nullptr) {
      float left[W] = {};
      if (sent != nullptr) to_residuals(s, x, residual_unit(a), w.coder.far(), left);
      store_wide<W>(a.residual + element, left);
    }
    if (a.out != nullptr) {
#pragma unroll
      for (int k = 0; k < W; ++k) x[k] *= a.out_scale;
      store_wide<W>(a.out + element, x);
    }
  });
}

// Draws 16 random bits for each value of a block that begins at `element`.
template <typename F>
__device__ __forceinline__ const uint16_t* draw_random(const Worker<F>& w, const ReduceEncode& a,
                                                       uint64_t step, int block) {
  const auto first =
      static_cast<uint64_t>(a.rounding.first_element + (w.first_block + block) * w.shape.block);
  const int shift = static_cast<int>(first % 16);  // a word serves two of sixteen elements
  uint16_t* const random = w.random;
  const int n = w.shape.block;
  const RoundingBits draws(a.rounding.seed, step, first);
  w.lanes.each((n + shift + 15) / 16 * 8, [&](int word) {
    const int i = word / 8 * 16 + word % 8 - shift;  // the word also serves element i + 8
    const uint32_t bits = draws.word(first + static_cast<uint64_t>(static_cast<int64_t>(i)));
    if (i >= 0 && i < n) random[i] = static_cast<uint16_t>(bits);
    if (i + 8 >= 0 && i + 8 < n) random[i + 8] = static_cast<uint16_t>(bits >> 16);
  });
  return random;
}

template <typename F>
__device__ __forceinline__ void reduce_encode_tile(const Worker<F>& w, const ReduceEncode& a, uint64_t step) {
  const int n = w.shape.block, first = w.lanes.team, teams = w.shape.teams;
  for (int block = first; block < w.blocks; block += teams) {
    const int valid = w.values_of(block);
    float* const sums = w.sums + block * n;
    // -0 is the additive identity, also for -0. Past the end of the array, encode sees 0.
    w.lanes.each(n, [=](int i) { sums[i] = i < valid ? -0.0f : 0.0f; });
  }
  for (int term = 0; term <= a.num_inputs; ++term) {
    if (term == a.own_position) {
      for (int block = first; block < w.blocks; block += teams) add_own(w, a, block);
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
    const float* sent = nullptr;
    if (a.wire != nullptr) {
      const uint16_t* const random = F::kStochastic && a.rounding.mode == Rounding::stochastic
                                         ? draw_random(w, a, step, block)
                                         : nullptr;
      w.coder.encode(w.lanes, w.sums + block * n, w.values_of(block), random, w.bytes + block * w.shape.bytes,
                     w.values);
      w.lanes.sync();
      sent = w.decode(w.bytes, block);
    }
    finish(w, a, block, sent);
  }
  if (a.wire != nullptr) w.put(a.wire);
}

// Encodes all tiles of this thread block.
template <typename F>
__device__ __forceinline__ void reduce_encode_tiles(Worker<F>& w, const ReduceEncode& a) {
  const int64_t all = w.coder.blocks(a.count), stride = int64_t{gridDim.x} * w.shape.blocks;
  for (int64_t first = int64_t{blockIdx.x} * w.shape.blocks; first < all; first += stride) {
    w.begin_tile(first, all);
    reduce_encode_tile(w, a, step_of(a.rounding));
  }
}

template <typename F>
__device__ __forceinline__ void decode_tiles(Worker<F>& w, const Decode& a) {
  const int64_t all = w.coder.blocks(a.count), stride = int64_t{gridDim.x} * w.shape.blocks;
  for (int64_t first = int64_t{blockIdx.x} * w.shape.blocks; first < all; first += stride) {
    w.begin_tile(first, all);
    const uint8_t* const bytes = w.fetch(a.wire);
    for (int block = w.lanes.team; block < w.blocks; block += w.shape.teams) {
      const float* const values = w.decode(bytes, block);
      w.for_values(block, [&](auto width, int i) {
        constexpr int W = decltype(width)::value;
        float x[W];
        const int64_t element = (w.first_block + block) * w.shape.block + i;
        load<W>(values + i, x);
        forget_not_finite<W>(x, a.residual == nullptr ? nullptr : a.residual + element);
#pragma unroll
        for (int k = 0; k < W; ++k) x[k] *= a.scale;
        store_wide<W>(a.out + element, x);
      });
    }
  }
}

}  // namespace
}  // namespace gradwire::cuda
