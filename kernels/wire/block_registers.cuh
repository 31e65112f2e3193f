// Block formats on CUDA for blocks of the default size: a block's values stay in registers
// (register_lanes.cuh). With the size known to the compiler, loops and divisions vanish. Blocks of other
// sizes, optional rotations and topk take block.cuh.
#pragma once

#include "kernels/cuda/copies.cuh"
#include "kernels/wire/block.cuh"
#include "kernels/wire/register_lanes.cuh"

namespace gradwire::cuda {
namespace {  // internal to each file: the shim finds only the shared variables of internal functions

// The block size of the kernels in registers; 0: the format has none.
template <typename F>
constexpr int register_block() {
  if constexpr (F::kMaxBlock > 512) {
    return 0;
  } else if constexpr (requires(F f) { f.size; }) {
    return F{}.size;
  } else {
    return F::kMaxBlock;
  }
}

// Keeps nvcc from computing x again for each use.
template <typename T>
__device__ __forceinline__ T held(T x) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(x));
  if constexpr (sizeof(T) == 4) asm volatile("" : "+r"(x));
#endif
  return x;
}
// The same for a pointer to shared memory, which stays one.
__device__ __forceinline__ uint8_t* held_shared(uint8_t* p) {
#ifdef __CUDA_ARCH__
  p = static_cast<uint8_t*>(
      __cvta_shared_to_generic(held(static_cast<uint32_t>(__cvta_generic_to_shared(p)))));
#endif
  return p;
}

// A tile of a block per team: a multiple of 16 bytes. In dynamic shared memory:
// float terms[teams][block]; the bytes of the result; the bytes of kStaged inputs.
template <typename F>
struct RegisterWorker {
  static constexpr int kBlock = register_block<F>();
  using Lanes = RegisterLanes<kBlock>;
  static constexpr int kTeams = Lanes::kTeams, kHeld = Lanes::kHeld;
  // The scales of all blocks follow the codes of all blocks, on the wire (fp8.h) and in a tile.
  static constexpr bool kSplit = requires { F::wire_bytes(0); };
    // Blocks per multiprocessor for which the kernels' registers suffice; sm_80 needs a few more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kMost = 3;
#else
  static constexpr int kMost = 4;
#endif
  // Whether add() of the format adds blocks to sums, and whether all of them.
  using At = decltype(BlockCoder<F>().place(static_cast<const uint8_t*>(nullptr), 0, 0));
  static constexpr bool kAdds = requires(F f, Lanes l, At at, float* sums) {
    f.add(l, at, 1.0f, sums);
  };
  static constexpr bool kAddsAll = kAdds && !requires(F f, Lanes l, At at) {
    f.adds(l, at, 1.0f);
  };
  static constexpr int kMinBlocks = kSplit ? 3 : kHeld > 8 ? 2 : kMost;
  static constexpr int kStaged = kHeld > 8 ? 4 : 8;         // inputs in shared memory at a time, at most
  static constexpr int kTileBytes = kTeams * (kBlock + 4);  // at most
  TileShape shape;
  int64_t count;  // values of the whole call
  bool wide;      // floats are 16-byte aligned
  BlockCoder<F, true> coder;
  Lanes lanes;
  uint8_t *coded, *staged;              // the result's bytes of the tile, and those of inputs
  const uint8_t* mine;                  // the first input's bytes of the team's block
  int skew;                             // of `mine`, from a 4-byte boundary
  int64_t first_block = 0, offset = 0;  // the tile's first block, and where it begins on the wire
  int blocks = 0, tile_bytes = 0;       // number of blocks in the tile, and of their bytes (kSplit: codes)
  bool fast = false;                    // the tile has only whole blocks, at 16-byte boundaries

  template <typename Coder>
  __host__ __device__ static TileShape shape_of(const Coder& coder) {
    return {.blocks = kTeams, .block = kBlock, .bytes = coder.bytes(), .teams = kTeams};
  }
  __host__ __device__ static int terms_bytes() {
    return kTeams * kBlock * 4;
  }
  // Returns the room for a tile's bytes, and for reading beyond its end.
  __host__ __device__ static int room_bytes(const TileShape& shape) {
    return shape.blocks * shape.bytes + 16;
  }
  static size_t shared_bytes(const TileShape& shape) {
    return static_cast<size_t>(terms_bytes() + (1 + kStaged) * room_bytes(shape));
  }

  __device__ __forceinline__ RegisterWorker(const BlockCoder<F>& its_coder, int64_t its_count, bool is_wide,
                                            unsigned char* shared)
      : count(its_count), wide(is_wide), coder{its_coder.format} {
    if constexpr (requires { coder.format.size; }) coder.format.size = kBlock;  // known to the compiler
    shape = shape_of(coder);
    const unsigned thread = threadIdx.x, group = Lanes::kGroup;
    lanes = {static_cast<int>(thread % group), static_cast<int>(thread / group),
             reinterpret_cast<float*>(shared)};
    lanes.terms += lanes.team * kBlock;
    if constexpr (F::kRotation == Rotation::always) lanes.signs = held(lanes.all_signs());
    coded = shared + terms_bytes();
    staged = coded + room_bytes(shape);
    mine = held_shared(staged + lanes.team * pitch());
    skew = kSplit ? 0 : held(lanes.team * pitch() % 4);
    staged = held_shared(staged);
  }
  // Begins the tile at block `first` of `all`.
  __device__ __forceinline__ void begin_tile(int64_t first, int64_t all) {
    first_block = first;
    blocks = all - first < shape.blocks ? static_cast<int>(all - first) : shape.blocks;
    fast = wide && count - first * kBlock >= shape.blocks * kBlock;
    offset = held(first * pitch());
    tile_bytes = held(blocks * pitch());
    if (kSplit && count - offset < tile_bytes) tile_bytes = static_cast<int>(count - offset);
  }
  // Returns the distance of blocks in bytes.
  __device__ __forceinline__ int pitch() const {
    return kSplit ? kBlock : shape.bytes;
  }
  // Calls body(most, begin, bytes, at) for each run of the tile's bytes on the wire: `bytes` bytes, at most
  // `most`, from `begin` on, are at `at` in shared memory.
  template <typename Body>
  __device__ __forceinline__ void each_run(const Body& body) const {
    body(std::integral_constant<int, kTileBytes>(), offset, tile_bytes, 0);
    if constexpr (kSplit)
      body(std::integral_constant<int, kTeams>(), fp8_scales_offset(count) + first_block, blocks,
           kTeams * kBlock);
  }
  // Copies the tile's bytes of inputs [0, n), n <= kInputs, to `staged`, an input by each part of the
  // threads; called by all threads of the block.
  template <int kInputs, typename Input>
  __device__ __forceinline__ void stage(int n, const Input& input) const {
    constexpr int kCopiers = kBlockThreads / kInputs;
    const int j = static_cast<int>(threadIdx.x) / kCopiers;
    __syncthreads();  // all threads have read the earlier bytes
    if (j < n) {
      const int thread = static_cast<int>(threadIdx.x) % kCopiers;
      each_run([&](auto most, int64_t begin, int bytes, int at) {
        const int whole = bytes & ~15;
        const auto* const from = held(static_cast<const uint8_t*>(input(j)) + begin + 16 * thread);
        uint8_t* const to = held_shared(staged + j * room_bytes(shape) + at + 16 * thread);
#pragma unroll
        for (int i = 0; i < most; i += 16 * kCopiers) {
          if (i + 16 * thread < whole) copy_async<16>(to + i, from + i, true);
        }
        const int last = whole - 15 * thread;
        if (whole + thread < bytes) to[last] = from[last];
      });
    }
    end_copies();
    wait_for_copies<0>();
    __syncthreads();
  }
  __device__ __forceinline__ void put(void* wire) const {
    const int thread = static_cast<int>(threadIdx.x);
    __syncthreads();  // all threads have written the bytes
    each_run([&](auto most, int64_t begin, int bytes, int at) {
      const int whole = bytes & ~15;
      uint8_t* const to = static_cast<uint8_t*>(wire) + begin;
      const uint8_t* const from = coded + at;
#pragma unroll
      for (int j = 0; j < most; j += 16 * kBlockThreads) {
        const int i = j + 16 * thread;
        if (i < whole) *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
      }
      if (whole != bytes && whole + thread < bytes) to[whole + thread] = from[whole + thread];
    });
    __syncthreads();
  }

  // Returns whether the team has a block in the tile.
  __device__ __forceinline__ bool has_block() const {
    return fast || lanes.team < blocks;
  }
  // Returns the number of the block's first value.
  __device__ __forceinline__ int64_t first_value() const {
    return (first_block + lanes.team) * kBlock;
  }
  // Returns the number of values of the block before the end of the array.
  __device__ __forceinline__ int valid() const {
    const int64_t left = count - first_value();
    return fast || left > kBlock ? kBlock : static_cast<int>(left);
  }
  // Loads the lane's values of the block; 0 after the end of the array. Partial or unaligned tiles pass
  // through shared memory: single accesses to registers would double the code.
  __device__ __forceinline__ void load_block(const float* from, float (&x)[kHeld]) const {
    const float* const mine = from + first_value();
    if (fast) {
#pragma unroll
      for (int row = 0; row < Lanes::kRows; ++row) {
        float four[4];
        load<4>(mine + lanes.slot(4 * row), four);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[4 * row + j] = four[j];
      }
    } else if (has_block()) {
      lanes.sync();
#pragma unroll 1
      for (int i = lanes.lane; i < kBlock; i += Lanes::kGroup) lanes.terms[i] = i < valid() ? mine[i] : 0.0f;
      lanes.sync();
      lanes.each(0, [&](Slot i) { x[i.k] = lanes.terms[i.i]; });
    }
  }
  // Stores the lane's values of the block.
  __device__ __forceinline__ void store_block(float* to, const float* x) const {
    float* const mine = to + first_value();
    if (fast) {
#pragma unroll
      for (int k = 0; k < kHeld; k += 4) {
        const float four[4] = {x[k], x[k + 1], x[k + 2], x[k + 3]};
        store_wide<4>(mine + lanes.slot(k).i, four);
      }
      return;
    }
    lanes.sync();
    lanes.each(0, [&](Slot i) { lanes.terms[i.i] = x[i.k]; });
    lanes.sync();
#pragma unroll 1
    for (int i = lanes.lane; i < valid(); i += Lanes::kGroup) mine[i] = lanes.terms[i];
  }
  // Returns the place, for the coder, of the team's block, whose codes are at `at` in a tile.
  template <typename Byte>
  __device__ __forceinline__ auto place(Byte* at) const {
    if constexpr (kSplit) {
      return typename F::template Place<Byte>{at, at + kTeams * kBlock - lanes.team * (kBlock - 1)};
    } else {
      return at;
    }
  }
  // Returns whether add() can add the team's block at `from`, as it can nearly every block.
  template <typename L>
  __device__ __forceinline__ bool adds(const L& l, const uint8_t* from, float scale) const {
    if constexpr (kAdds && !kAddsAll) return coder.format.adds(l, place(from), scale);
    return kAdds;
  }
  // Adds the block, times `scale`, to sums.
  template <typename L>
  __device__ __forceinline__ void add(const L& l, const uint8_t* from, float scale, float* sums) const {
    if constexpr (kAdds) coder.format.add(l, place(from), scale, sums);
  }
  // Returns the lanes for a staged input.
  __device__ __forceinline__ auto reading() const {
    return RegisterLanes<kBlock, true>{lanes.lane, lanes.team, lanes.terms, skew, lanes.signs};
  }
  // Decodes the team's block at `from`.
  template <typename L>
  __device__ __forceinline__ void decode(const L& l, const uint8_t* from, float* x) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) x[k] = -0.0f;  // the additive identity, also for -0
    if (adds(l, from, 1.0f)) return add(l, from, 1.0f, x);
    coder.decode(l, place(from), kBlock, HeldValues{x});
  }
  // Adds the team's block of a staged input, times `scale`, to `sums`.
  __device__ __forceinline__ void add_decoded(const uint8_t* from, float scale, float* sums) const {
    if constexpr (F::kRotation == Rotation::always) {  // rotates values in place
      float x[kHeld];
      coder.decode(reading(), place(from), kBlock, HeldValues{x});
      lanes.each(0, [&](Slot i) { AddedValues{sums, scale}[i] = x[i.k]; });
    } else {
      coder.decode(reading(), place(from), kBlock, AddedValues{sums, scale});
    }
  }
};

// Encodes the team's block, and stores what it decodes to in `sent`.
template <typename F>
__device__ __forceinline__ void encode_held(const RegisterWorker<F>& w, const ReduceEncode& a,
                                            const RoundingBits& draws, float* sums, float* sent) {
  constexpr int kHeld = RegisterWorker<F>::kHeld;
  uint8_t* const at = w.coded + w.lanes.team * w.pitch();
  const auto to = w.place(at);
  const int valid = w.valid();
  const BlockRandom random(draws, a.rounding.first_element + w.first_value(), w.kBlock,
                           F::kStochastic && a.rounding.mode == Rounding::stochastic);
  const HeldValues sent_values{sent};
  const ReadValues<kHeld> values(sums);
  if constexpr (requires { w.coder.format.encode(w.lanes, values, valid, random, to, sent_values); }) {
    static_assert(!decltype(w.coder)::kMayMask || F::kRotation == Rotation::optional);  // never a mask here
    w.coder.encode_values(w.lanes, values, valid, random, to, sent_values, sent_values);
  } else {
    w.coder.encode(w.lanes, values, valid, random, to, sent_values);
    w.lanes.sync();
    w.decode(w.lanes, at, sent);
  }
}

// Returns the sums of the team's block.
template <typename F>
__device__ __forceinline__ void sum_held(const RegisterWorker<F>& w, const ReduceEncode& a,
                                         float (&sums)[RegisterWorker<F>::kHeld]) {
  constexpr int kHeld = RegisterWorker<F>::kHeld, kStaged = RegisterWorker<F>::kStaged;
  [[maybe_unused]] constexpr int kUnroll = RegisterWorker<F>::kSplit ? 1 : 2;  // fp8 has too few registers
#pragma unroll
  for (int k = 0; k < kHeld; ++k) sums[k] = -0.0f;  // the additive identity, also for -0
  const uint8_t* from = w.mine;
#pragma unroll 1
  for (int input = 0, staged = 0;;) {
    if (input == a.own_position)
      add_own(
          a, [&](const float* values, float(&x)[kHeld]) { w.load_block(values, x); }, sums);
    if (input >= a.num_inputs) break;
    if (input == staged) {
      w.template stage<kStaged>(a.num_inputs - input, [&](int j) { return a.inputs[input + j]; });
      staged = a.num_inputs - input < kStaged ? a.num_inputs : input + kStaged;
      from = w.mine;
    }
    const int end = input < a.own_position && a.own_position < staged ? a.own_position : staged;
    if (!w.has_block()) input = end;
    for (; input < end; ++input, from += w.room_bytes(w.shape)) {
#pragma unroll kUnroll
      for (; input < end && w.adds(w.reading(), from, a.input_scale(input)); from += w.room_bytes(w.shape))
        w.add(w.reading(), from, a.input_scale(input++), sums);
      if (w.kAddsAll || input == end) break;
      w.add_decoded(from, a.input_scale(input), sums);
    }
  }
}

template <typename F>
__device__ __forceinline__ void reduce_encode_tiles(RegisterWorker<F>& w, const ReduceEncode& a) {
  constexpr int kHeld = RegisterWorker<F>::kHeld;
  constexpr bool kFar = F::kMasks || F::kRotation == Rotation::always;
  const RoundingBits draws = draws_of(a);
  for_tiles(w, [&] {
    float sums[kHeld], sent[kHeld];
    sum_held(w, a, sums);
    if (w.has_block()) {
      if (!w.fast) {  // encode sees 0 after the end of the array
        w.lanes.each(0, [&](Slot i) { sums[i.k] = i.i < w.valid() ? sums[i.k] : 0.0f; });
      }
      if (a.wire != nullptr) {
        encode_held(w, a, draws, sums, sent);
      } else {
#pragma unroll
        for (int k = 0; k < kHeld; ++k) sent[k] = sums[k];
      }
      finish(a, kFar, sums, sent, [&](float* to, const float* x) { w.store_block(to, x); });
    }
    if (a.wire != nullptr) w.put(a.wire);
  });
}

template <typename F>
__device__ __forceinline__ void decode_tiles(RegisterWorker<F>& w, const Decode& a) {
  constexpr int kHeld = RegisterWorker<F>::kHeld;
  for_tiles(w, [&] {
    w.template stage<1>(1, [&](int) { return a.wire; });
    if (!w.has_block()) return;
    float x[kHeld], none = 0.0f;
    w.decode(w.reading(), w.mine, x);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) none = fmaf(x[k], 0.0f, none);
    if (none != 0.0f && a.residual != nullptr) {  // rare
      w.lanes.each(0, [&](Slot i) {
        if (!is_finite(x[i.k]) && i.i < w.valid()) a.residual[w.first_value() + i.i] = 0.0f;
      });
    }
#pragma unroll
    for (int k = 0; k < kHeld; ++k) x[k] *= a.scale;
    w.store_block(a.out, x);
  });
}

}  // namespace
}  // namespace gradwire::cuda
