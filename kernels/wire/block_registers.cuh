// Block formats on CUDA for blocks of the default size: a block's values stay in registers, four adjacent
// values of each 4 * kGroup to a lane. With the size known to the compiler, loops and divisions vanish.
// Blocks of other sizes, optional rotations and topk take block.cuh.
#pragma once

#include <cstddef>

#include "kernels/wire/block.cuh"

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

// A value of a block that a lane holds: its number in the block, and its register.
struct Slot {
  int i, k;
  __device__ __forceinline__ operator int() const { return i; }
};

// The values and random bits that a lane holds. Inlining removes the pointer.
struct HeldValues {
  float* x;
  __device__ __forceinline__ float& operator[](Slot slot) const { return x[slot.k]; }
};
// Values that several passes read. Without the asm, nvcc would hold what one pass computes for the next, in
// more registers than there are.
template <int kHeld>
struct ReadValues {
  const float* x;
  __device__ __forceinline__ explicit ReadValues(const float* values) : x(values) {}
  __device__ __forceinline__ ReadValues(HeldValues values) : x(values.x) {}
  __device__ __forceinline__ float operator[](Slot slot) const {
    float value = x[slot.k];
#ifdef __CUDA_ARCH__
    if (kHeld > 4) asm volatile("" : "+f"(value));
#endif
    return value;
  }
};
// Random bits of the elements from `first` on, drawn when used. A key serves 2^32 elements, so a block has
// one or two.
struct HeldRandom {
  RoundingKey key, next;
  uint32_t first;
  bool drawn;
  __device__ __forceinline__ uint32_t operator[](Slot slot) const {
    const uint32_t element = first + static_cast<uint32_t>(slot.i);
    const uint32_t word = rounding_word(element < first ? next : key, rounding_word_of(element));
    return (word >> rounding_shift_of(element)) & 0xffffu;
  }
  __device__ __forceinline__ bool operator!=(std::nullptr_t) const { return drawn; }
};
struct KeepSent {
  HeldValues sent;
  template <bool kFinite>
  __device__ __forceinline__ void put(Slot slot, float x) const {
    sent[slot] = x;
  }
};

// The lanes of a block of N values: a warp, or a part of one. kReadOnly: no thread writes to the tile while
// others read it, so that a lane may read four bytes as two aligned words.
template <int N, bool kReadOnly = false>
struct RegisterLanes {
  static constexpr int kGroup = N / 4 < 32 ? N / 4 : 32, kRow = 4 * kGroup, kRows = N / kRow,
                       kHeld = 4 * kRows;
  static constexpr int kTeams = kBlockThreads / kGroup;
  int lane, team;
  float* terms;  // shared, (N)

  __device__ __forceinline__ uint32_t mask() const {
    if constexpr (kGroup == 32) {
      return 0xffffffffu;
    } else {
      return ((1u << kGroup) - 1u) << (threadIdx.x % 32 / kGroup * kGroup);
    }
  }
  __device__ __forceinline__ void sync() const { __syncwarp(mask()); }
  // Returns the number of the lane's first value.
  __device__ __forceinline__ int first() const { return 4 * lane; }
  __device__ __forceinline__ Slot slot(int k) const { return {first() + k / 4 * kRow + k % 4, k}; }
  template <typename Body>
  __device__ __forceinline__ void each(int, const Body& body) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) body(slot(k));
  }

  template <typename Value>
  __device__ __forceinline__ uint32_t max(int, const Value& value) const {
    uint32_t largest = 0;
    each(N, [&](Slot i) {
      const uint32_t x = value(i);
      largest = x > largest ? x : largest;
    });
    if constexpr (kGroup == 32) return __reduce_max_sync(0xffffffffu, largest);
    return max_over(kGroup, largest);
  }
  // Returns the largest finite magnitude among the lanes that hold the same group of `size` values.
  __device__ __forceinline__ uint32_t group_max(int size, ReadValues<kHeld> values) const {
    static_assert(kRows == 1);
    uint32_t largest = 0;
    each(N, [&](Slot i) {
      const uint32_t x = finite_magnitude_bits(values[i]);
      largest = x > largest ? x : largest;
    });
    return max_over(size / 4, largest);
  }
  // Adds in the order of WarpLanes: lane r adds every 32nd value, from value r on.
  template <typename Value>
  __device__ __forceinline__ float sum(int, const Value& value) const {
    static_assert(kGroup == kSumLanes);
    float x[kHeld];
    each(N, [&](Slot i) { x[i.k] = value(i); });
    sync();  // the earlier terms have been read
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      *reinterpret_cast<float4*>(terms + first() + row * kRow) =
          make_float4(x[4 * row], x[4 * row + 1], x[4 * row + 2], x[4 * row + 3]);
    }
    sync();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i += 32) sum += terms[lane + i];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    return sum;
  }

  template <int kBits, typename Code>
  __device__ __forceinline__ void pack(int, uint8_t* bytes, const Code& code) const {
    uint32_t codes[kHeld];
    each(N, [&](Slot i) { codes[i.k] = code(i); });
    constexpr int kLower = lower_code_bits(kBits), kUpper = kBits - kLower;
    pack_words<kLower>(codes, 0, bytes);
    if constexpr (kUpper > 0) pack_words<kUpper>(codes, kLower, bytes + code_bytes<kLower>(N));
  }
  template <int kBits, typename Take>
  __device__ __forceinline__ void unpack(const uint8_t* bytes, int, int, const Take& take) const {
    uint32_t codes[kHeld] = {};
    constexpr int kLower = lower_code_bits(kBits), kUpper = kBits - kLower;
    unpack_words<kLower>(bytes, 0, codes);
    if constexpr (kUpper > 0) unpack_words<kUpper>(bytes + code_bytes<kLower>(N), kLower, codes);
    each(N, [&](Slot i) { take(i, codes[i.k]); });
  }

  // Writes all bytes of a mask but the scale, which the caller writes.
  __device__ __forceinline__ void put_mask(ReadValues<kHeld> s, int bytes, uint8_t* to) const {
#pragma unroll 1
    for (int j = lane; j < bytes; j += kGroup) to[j] = 0;
    sync();
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      uint32_t bits = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) bits |= is_finite(s[slot(4 * row + k)]) ? 0u : 1u << k;
      bits |= __shfl_xor_sync(mask(), bits, 1) << 4;
      if (lane % 2 == 0) to[(first() + row * kRow) / 8] = static_cast<uint8_t>(bits);
    }
    sync();
  }
  template <typename Body>
  __device__ __forceinline__ void each_rarely(int n, const Body& body) const {
    each(n, body);
  }

  __device__ __forceinline__ void rotate(ReadValues<kHeld> values, int, float scale, HeldValues to) const {
    each(N, [&](Slot i) { to[i] = bits_float(float_bits(values[i] * scale) ^ rotation_sign(i)); });
    hadamard(to.x);
  }
  __device__ __forceinline__ void rotate_back(HeldValues values, int) const {
    each(N, [&](Slot i) { values[i] *= kRotationDown; });
    hadamard(values.x);
    each(N, [&](Slot i) {
      values[i] = bits_float(float_bits(within(values[i], kRotationMost) * kRotationUp) ^ rotation_sign(i));
    });
  }

 private:
  // Returns the largest value among 4 to 32 neighboring lanes.
  __device__ __forceinline__ uint32_t max_over(int lanes, uint32_t largest) const {
#pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      const uint32_t other = __shfl_xor_sync(mask(), largest, distance);
      largest = other > largest ? other : largest;
    }
    return largest;
  }

  // Applies the levels h = N / 2, ..., 1 of the butterfly: between rows, between lanes, within four values.
  __device__ __forceinline__ void hadamard(float* x) const {
#pragma unroll
    for (int h = kRows / 2; h > 0; h /= 2) butterflies(x, 4 * h);
#pragma unroll
    for (int distance = kGroup / 2; distance > 0; distance /= 2) {
      const float sign = (lane & distance) != 0 ? -1.0f : 1.0f;
#pragma unroll
      for (int k = 0; k < kHeld; ++k) x[k] = fmaf(sign, x[k], __shfl_xor_sync(mask(), x[k], distance));
    }
    butterflies(x, 2);
    butterflies(x, 1);
  }
  __device__ __forceinline__ static void butterflies(float* x, int distance) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if ((k & distance) != 0) continue;
      const float a = x[k], b = x[k + distance];
      x[k] = a + b;
      x[k + distance] = a - b;
    }
  }

  // The layout of codes.h, four bytes at a time. Byte j holds the codes of values j, j + m, ... for m bytes.
  // If m is at least a row, a lane holds all values of its bytes; otherwise kSharers lanes do.
  template <int kBits>
  struct Words {
    static constexpr int kBytes = code_bytes<kBits>(N);
    static constexpr int kSharers = kBytes < kRow ? kRow / kBytes : 1;
    static constexpr int kWordRows = kBytes < kRow ? 1 : kBytes / kRow;
  };
  // Returns the part of a byte, counted in codes, that row `row` of the lane takes.
  template <int kBits>
  __device__ __forceinline__ int part_of(int row) const {
    using W = Words<kBits>;
    if constexpr (W::kSharers > 1) return row * W::kSharers + first() / W::kBytes;
    return row / W::kWordRows;
  }
  // Packs bits [from, from + kBits) of the codes.
  template <int kBits>
  __device__ __forceinline__ void pack_words(const uint32_t* codes, int from, uint8_t* bytes) const {
    using W = Words<kBits>;
    constexpr uint32_t kMask = (1u << kBits) - 1u;
    uint32_t words[W::kWordRows] = {};
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      uint32_t four = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) four |= ((codes[4 * row + k] >> from) & kMask) << (8 * k);
      words[row % W::kWordRows] |= four << (kBits * part_of<kBits>(row));
    }
    if constexpr (W::kSharers > 1) {
#pragma unroll
      for (int distance = W::kBytes / 4; distance < kGroup; distance *= 2)
        words[0] |= __shfl_xor_sync(mask(), words[0], distance);
    }
    if (W::kSharers > 1 && first() >= W::kBytes) return;
#pragma unroll
    for (int row = 0; row < W::kWordRows; ++row) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        bytes[first() + row * kRow + k] = static_cast<uint8_t>(words[row] >> (8 * k));
    }
  }
  template <int kBits>
  __device__ __forceinline__ void unpack_words(const uint8_t* bytes, int to, uint32_t* codes) const {
    using W = Words<kBits>;
    constexpr uint32_t kMask = (1u << kBits) - 1u;
    uint32_t words[W::kWordRows];
#pragma unroll
    for (int row = 0; row < W::kWordRows; ++row)
      words[row] = word_at(bytes + (W::kSharers > 1 ? first() % W::kBytes : first() + row * kRow));
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const uint32_t four = words[row % W::kWordRows] >> (kBits * part_of<kBits>(row));
#pragma unroll
      for (int k = 0; k < 4; ++k) codes[4 * row + k] |= ((four >> (8 * k)) & kMask) << to;
    }
  }
  // Returns four bytes of shared memory at any address.
  __device__ __forceinline__ static uint32_t word_at(const uint8_t* bytes) {
    if constexpr (kReadOnly) {
      const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(bytes) % 4);
      const auto* const words = reinterpret_cast<const uint32_t*>(bytes - skew);
      return __funnelshift_r(words[0], words[1], 8 * skew);
    } else {
      return bytes[0] | bytes[1] << 8 | bytes[2] << 16 | static_cast<uint32_t>(bytes[3]) << 24;
    }
  }
};

// A tile of two blocks per team, or one if blocks are long. In dynamic shared memory: float
// terms[teams][block]; the bytes of an input; the bytes of the result.
template <typename F>
struct RegisterWorker : Tile<TileShape> {
  static constexpr int kBlock = register_block<F>(), kBlocks = kBlock > 256 ? 1 : 2;
  using Lanes = RegisterLanes<kBlock>;
  static constexpr int kTeams = Lanes::kTeams, kHeld = Lanes::kHeld;
  static constexpr int kMinBlocks = F::kRotation == Rotation::always ? 2
                                    : kHeld > 4                      ? 3
                                                                     : 4;  // per multiprocessor
  BlockCoder<F, true> coder;
  Lanes lanes;
  uint8_t* room;             // for the result's bytes
  uint8_t* coded = nullptr;  // the result's bytes of the tile, in `room`
  bool fast = false;         // the tile has only whole blocks, at 16-byte boundaries

  template <typename Coder>
  __host__ __device__ static TileShape shape_of(const Coder& coder) {
    return {.blocks = kBlocks * kTeams, .block = kBlock, .bytes = coder.bytes(), .teams = kTeams};
  }
  __host__ __device__ static int terms_bytes() { return kTeams * kBlock * 4; }
  // Returns the room for a tile's bytes at any offset from a 16-byte boundary, and for reading beyond its
  // end.
  __host__ __device__ static int room_bytes(const TileShape& shape) {
    return (shape.blocks * shape.bytes + 15 + 4 + 15) / 16 * 16;
  }
  static size_t shared_bytes(const TileShape& shape) {
    return static_cast<size_t>(terms_bytes() + 2 * room_bytes(shape));
  }

  __device__ __forceinline__ RegisterWorker(const BlockCoder<F>& its_coder, int64_t its_count, bool is_wide,
                                            unsigned char* shared)
      : Tile<TileShape>({}, its_count, is_wide), coder{its_coder.format} {
    if constexpr (requires { coder.format.size; }) coder.format.size = kBlock;  // known to the compiler
    shape = shape_of(coder);
    const unsigned thread = threadIdx.x, group = Lanes::kGroup;
    lanes = {static_cast<int>(thread % group), static_cast<int>(thread / group),
             reinterpret_cast<float*>(shared)};
    lanes.terms += lanes.team * kBlock;
    memory = shared + terms_bytes();
    room = memory + room_bytes(shape);
  }
  __device__ __forceinline__ void begin(int64_t first, int64_t all) {
    begin_tile(first, all);
    coded = room + (bytes - memory);
    fast = wide && count - first * kBlock >= shape.blocks * kBlock;
  }
  __device__ __forceinline__ void put(void* wire) const {
    move_bytes(static_cast<uint8_t*>(wire) + first_block * shape.bytes, coded);
  }

  // Calls body(b, block) for the team's blocks of the tile.
  template <typename Body>
  __device__ __forceinline__ void each_block(const Body& body) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int block = lanes.team + b * kTeams;
      if (fast || block < blocks) body(b, block);
    }
  }
  __device__ __forceinline__ int64_t begin_of(int block) const {
    return (first_block + block) * kBlock;
  }
  // Returns the number of values of a block before the end of the array.
  __device__ __forceinline__ int valid_of(int block) const {
    const int64_t left = count - begin_of(block);
    return fast || left > kBlock ? kBlock : static_cast<int>(left);
  }
  // Loads the lane's values of the tile; 0 after the end of the array. Other tiles than fast ones pass
  // through shared memory: single accesses to registers would double the code.
  __device__ __forceinline__ void load_tile(const float* from, float (&x)[kBlocks][kHeld]) const {
    if (fast) {
      const float* const mine = from + begin_of(lanes.team) + lanes.first();
#pragma unroll
      for (int k = 0; k < kBlocks * kHeld; k += 4) {
        float four[4];
        load<4>(mine + k / kHeld * kTeams * kBlock + k % kHeld / 4 * Lanes::kRow, four);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[k / kHeld][k % kHeld + j] = four[j];
      }
      return;
    }
    each_block([&](int b, int block) {
      const int valid = valid_of(block);
      const float* const mine = from + begin_of(block);
      lanes.sync();
#pragma unroll 1
      for (int i = lanes.lane; i < kBlock; i += Lanes::kGroup) lanes.terms[i] = i < valid ? mine[i] : 0.0f;
      lanes.sync();
      lanes.each(0, [&](Slot i) { x[b][i.k] = lanes.terms[i.i]; });
    });
  }
  // Stores the lane's values of a block.
  __device__ __forceinline__ void store_block(float* to, int block, const float* x) const {
    float* const mine = to + begin_of(block);
    if (fast) {
#pragma unroll
      for (int k = 0; k < kHeld; k += 4) {
        const float four[4] = {x[k], x[k + 1], x[k + 2], x[k + 3]};
        store_wide<4>(mine + lanes.slot(k).i, four);
      }
      return;
    }
    const int valid = valid_of(block);
    lanes.sync();
    lanes.each(0, [&](Slot i) { lanes.terms[i.i] = x[i.k]; });
    lanes.sync();
#pragma unroll 1
    for (int i = lanes.lane; i < valid; i += Lanes::kGroup) mine[i] = lanes.terms[i];
  }
  // Decodes a block of an input.
  __device__ __forceinline__ void decode(const uint8_t* from, int block, float* x) const {
    const RegisterLanes<kBlock, true> reading{lanes.lane, lanes.team, lanes.terms};
    coder.decode(reading, from + block * shape.bytes, kBlock, HeldValues{x});
  }
};

// Adds own + residual to the sums of the tile.
template <typename F, typename Args>
__device__ __forceinline__ void add_own_held(
    const RegisterWorker<F>& w, const Args& a,
    float (&sums)[RegisterWorker<F>::kBlocks][RegisterWorker<F>::kHeld]) {
  constexpr int kBlocks = RegisterWorker<F>::kBlocks, kHeld = RegisterWorker<F>::kHeld;
  float own[kBlocks][kHeld] = {}, kept[kBlocks][kHeld] = {};
  w.load_tile(a.own, own);
  if (a.residual != nullptr) {
    w.load_tile(a.residual, kept);
#pragma unroll
    for (int k = 0; k < kBlocks * kHeld; ++k) {
      float& x = own[k / kHeld][k % kHeld];
      x = fmaf(a.residual_scale, kept[k / kHeld][k % kHeld], x);
    }
  }
#pragma unroll
  for (int k = 0; k < kBlocks * kHeld; ++k) {
    float& sum = sums[k / kHeld][k % kHeld];
    sum = fmaf(a.own_scale, own[k / kHeld][k % kHeld], sum);
  }
}

// Writes the residual and the result of a block whose encoding decodes to `sent`.
template <typename F, typename Args>
__device__ __forceinline__ void finish_held(const RegisterWorker<F>& w, const Args& a, int block,
                                            const float* sums, float* sent) {
  constexpr int kHeld = RegisterWorker<F>::kHeld;
  constexpr bool kFar = F::kMasks || F::kRotation == Rotation::always;
  if (a.residual != nullptr) {
    const float unit = residual_unit(a);
    float left[kHeld];
#pragma unroll
    for (int k = 0; k < kHeld; ++k)
      left[k] = a.wire != nullptr ? rest_of<kFar>(sums[k], sent[k], unit) : 0.0f;
    w.store_block(a.residual, block, left);
  }
  if (a.out != nullptr) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) sent[k] *= a.out_scale;
    w.store_block(a.out, block, sent);
  }
}

// Returns the random bits of a block that begins at `first`; none, to round to nearest.
template <int kBlock>
__device__ __forceinline__ HeldRandom random_of(const RoundingBits& draws, uint64_t first, bool drawn) {
  const uint64_t last = first + kBlock - 1;
  HeldRandom random{draws.key, draws.key, static_cast<uint32_t>(first), drawn};
  if (first >> 32 != draws.near || last >> 32 != draws.near) {
    random.key = rounding_key(draws.seed, draws.stream, first);
    random.next = rounding_key(draws.seed, draws.stream, last);
  }
  return random;
}

// Encodes a block of the tile, and stores what it decodes to in `sent`.
template <typename F, typename Args>
__device__ __forceinline__ void encode_held(const RegisterWorker<F>& w, const Args& a,
                                            const RoundingBits& draws, int block, float* sums, float* sent) {
  constexpr int kHeld = RegisterWorker<F>::kHeld;
  uint8_t* const to = w.coded + block * w.shape.bytes;
  const int valid = w.valid_of(block);
  const int64_t first = a.rounding.first_element + w.begin_of(block);
  const HeldRandom random = random_of<RegisterWorker<F>::kBlock>(
      draws, static_cast<uint64_t>(first), F::kStochastic && a.rounding.mode == Rounding::stochastic);
  const HeldValues sent_values{sent};
  const ReadValues<kHeld> values(sums);
  if constexpr (requires {
                  w.coder.format.encode(w.lanes, values, valid, random, to, KeepSent{sent_values});
                }) {
    static_assert(!decltype(w.coder)::kMayMask || F::kRotation == Rotation::optional);  // never a mask here
    w.coder.encode_values(w.lanes, values, valid, random, to, sent_values, KeepSent{sent_values});
  } else {
    w.coder.encode(w.lanes, values, valid, random, to, sent_values);
    w.lanes.sync();
    w.coder.decode(w.lanes, static_cast<const uint8_t*>(to), w.kBlock, sent_values);
  }
}

// Encodes all tiles of this thread block.
template <typename F, typename Args, typename Wires>
__device__ __forceinline__ void reduce_encode_registers(RegisterWorker<F>& w, const Args& a, Wires&& wires) {
  constexpr int kBlocks = RegisterWorker<F>::kBlocks, kHeld = RegisterWorker<F>::kHeld;
  const int64_t all = w.coder.blocks(a.count), stride = int64_t{gridDim.x} * w.shape.blocks;
  const RoundingBits draws(a.rounding.seed, step_of(a.rounding),
                           static_cast<uint64_t>(a.rounding.first_element));
  for (int64_t tile = int64_t{blockIdx.x} * w.shape.blocks; tile < all; tile += stride) {
    w.begin(tile, all);
    float sums[kBlocks][kHeld];  // -0 is the additive identity, also for -0
#pragma unroll
    for (int k = 0; k < kBlocks * kHeld; ++k) sums[k / kHeld][k % kHeld] = -0.0f;
#pragma unroll 1
    for (int term = 0; term <= a.num_inputs; ++term) {
      if (term == a.own_position) {
        add_own_held(w, a, sums);
        continue;
      }
      const int input = term < a.own_position ? term : term - 1;
      const float scale = a.input_scale(input);
      const uint8_t* const bytes = wires(a.input(input));
      w.each_block([&](int b, int block) {
        float x[kHeld];
        w.decode(bytes, block, x);
#pragma unroll
        for (int k = 0; k < kHeld; ++k) sums[b][k] = fmaf(scale, x[k], sums[b][k]);
      });
    }
    w.each_block([&](int b, int block) {
      float sent[kHeld];
      const int valid = w.valid_of(block);
      if (!w.fast) {  // encode sees 0 after the end of the array
        w.lanes.each(0, [&](Slot i) { sums[b][i.k] = i.i < valid ? sums[b][i.k] : 0.0f; });
      }
      if (a.wire != nullptr) {
        encode_held(w, a, draws, block, sums[b], sent);
      } else {
#pragma unroll
        for (int k = 0; k < kHeld; ++k) sent[k] = sums[b][k];
      }
      finish_held(w, a, block, sums[b], sent);
    });
    if (a.wire != nullptr) w.put(a.wire);
  }
}

// Sets the residual to 0 where a decoded block is not finite, which is rare.
template <typename F>
__device__ __forceinline__ void forget_held(const RegisterWorker<F>& w, float* residual, int block,
                                            const float* x) {
  w.lanes.each(0, [&](Slot i) {
    if (!is_finite(x[i.k]) && i.i < w.valid_of(block)) residual[w.begin_of(block) + i.i] = 0.0f;
  });
}

template <typename F, typename Wires>
__device__ __forceinline__ void decode_registers(RegisterWorker<F>& w, const Decode& a, Wires&& wires) {
  const int64_t all = w.coder.blocks(a.count), stride = int64_t{gridDim.x} * w.shape.blocks;
  for (int64_t tile = int64_t{blockIdx.x} * w.shape.blocks; tile < all; tile += stride) {
    w.begin(tile, all);
    const uint8_t* const bytes = wires(a.wire);
    w.each_block([&](int, int block) {
      constexpr int kHeld = RegisterWorker<F>::kHeld;
      float x[kHeld], none = 0.0f;
      w.decode(bytes, block, x);
#pragma unroll
      for (int k = 0; k < kHeld; ++k) none = fmaf(x[k], 0.0f, none);
      if (none != 0.0f && a.residual != nullptr) forget_held(w, a.residual, block, x);
#pragma unroll
      for (int k = 0; k < kHeld; ++k) x[k] *= a.scale;
      w.store_block(a.out, block, x);
    });
  }
}

}  // namespace
}  // namespace gradwire::cuda
