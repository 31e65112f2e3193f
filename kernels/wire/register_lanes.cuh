// The values of a block in registers, and the lanes that hold them: four adjacent values of each 4 * kGroup
// to a lane (block_registers.cuh).
#pragma once

#include "kernels/wire/block_lanes.cuh"

namespace gradwire::cuda {
namespace {  // internal to each file: the shim finds only the shared variables of internal functions

// A value of a block that a lane holds: its number in the block, and its register.
struct Slot {
  int i, k;
  __device__ __forceinline__ operator int() const { return i; }
};

// The values that a lane holds, also as a sink. Inlining removes the pointer.
struct HeldValues {
  float* x;
  __device__ __forceinline__ float& operator[](Slot slot) const { return x[slot.k]; }
  template <bool kFinite>
  __device__ __forceinline__ void put(Slot slot, float value) const {
    x[slot.k] = value;
  }
};
// Adds each assigned value, times a power of two, to the sum in its place.
struct AddedValues {
  float* sums;
  float scale;
  struct Sum {
    float &sum, scale;
    __device__ __forceinline__ void operator=(float x) const { sum = fmaf(scale, x, sum); }
  };
  __device__ __forceinline__ Sum operator[](Slot slot) const { return {sums[slot.k], scale}; }
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
    if (kHeld > 8) asm volatile("" : "+f"(value));
#endif
    return value;
  }
};
struct NoRowUnit {
  __device__ __forceinline__ float operator()(int) const { return 1.0f; }
};

// The lanes of a block of N values: a warp, or a part of one. kReadOnly: no thread writes to the tile while
// others read it, so that a lane may read four bytes as two aligned words.
template <int N, bool kReadOnly = false>
struct RegisterLanes {
  static constexpr int kGroup = N > 32 ? N / 16 : N / 8, kRow = 4 * kGroup, kRows = N / kRow,
                       kHeld = 4 * kRows;
  static constexpr int kTeams = kBlockThreads / kGroup;
  int lane, team;
  float* terms;        // shared, (N)
  int skew = 0;        // of the block that is read, from a 4-byte boundary
  uint32_t signs = 0;  // of the rotation, a bit for each register

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
    return max_over(kGroup, largest);
  }
  // Returns the largest magnitude of all values, as bits; see largest_magnitude().
  __device__ __forceinline__ uint32_t largest(ReadValues<kHeld> values) const {
    float x[kHeld];
    each(N, [&](Slot i) { x[i.k] = values[i]; });
    return max_over(kGroup, largest_magnitude(x));
  }
  // Returns the largest magnitude of the group of `size` values to which four of the lane's values belong.
  __device__ __forceinline__ uint32_t group_max(int size, int row, ReadValues<kHeld> values) const {
    float x[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) x[k] = values[slot(4 * row + k)];
    return max_over(size / 4, largest_magnitude(x));
  }
  // Adds in the order of WarpLanes: every 32nd value, from each of the first 32 on, then halves.
  template <typename Value>
  __device__ __forceinline__ float sum(int, const Value& value) const {
    float x[kHeld];
    each(N, [&](Slot i) { x[i.k] = value(i); });
    sync();  // the earlier terms have been read
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      *reinterpret_cast<float4*>(terms + first() + row * kRow) =
          make_float4(x[4 * row], x[4 * row + 1], x[4 * row + 2], x[4 * row + 3]);
    }
    sync();
    float part[32 / kGroup] = {};
#pragma unroll
    for (int i = 0; i < N; i += kGroup) part[i % 32 / kGroup] += terms[lane + i];
#pragma unroll
    for (int parts = 32 / kGroup / 2; parts > 0; parts /= 2) {
#pragma unroll
      for (int p = 0; p < parts; ++p) part[p] += part[p + parts];
    }
#pragma unroll
    for (int distance = kGroup / 2; distance > 0; distance /= 2)
      part[0] += __shfl_xor_sync(mask(), part[0], distance);
    return part[0];
  }

  template <int kBits, typename Code>
  __device__ __forceinline__ void pack(int, uint8_t* bytes, const Code& code) const {
    uint32_t fours[kRows] = {};
    each(N, [&](Slot i) { fours[i.k / 4] |= code(i) << (8 * (i.k % 4)); });
    pack_fours<kBits>(fours, bytes);
  }
  // Packs codes, of which a word has four.
  template <int kBits>
  __device__ __forceinline__ void pack_fours(const uint32_t* fours, uint8_t* bytes) const {
    constexpr int kLower = lower_code_bits(kBits), kUpper = kBits - kLower;
    pack_words<kLower>(fours, 0, bytes);
    if constexpr (kUpper > 0) pack_words<kUpper>(fours, kLower, bytes + code_bytes<kLower>(N));
  }
  template <int kBits, typename Take>
  __device__ __forceinline__ void unpack(const uint8_t* bytes, int, int, const Take& take) const {
    uint32_t fours[kRows] = {};
    unpack_rows<kBits>(bytes, fours);
    each(N, [&](Slot i) { take(i, fours[i.k / 4] >> (8 * (i.k % 4)) & 0xffu); });
  }
  // Adds decoded values times `unit` and row_unit(row), at most 448, to sums: four(words, x) decodes codes,
  // of which a word has four. Units have few bits, so that products are exact where has_exact_products(unit).
  template <int kBits, typename Four, typename RowUnit = NoRowUnit>
  __device__ __forceinline__ void add_fours(const uint8_t* bytes, float unit, float* sums, const Four& four,
                                            const RowUnit& row_unit = {}) const {
    uint32_t fours[kRows] = {};
    unpack_rows<kBits>(bytes, fours);
    float x[kHeld];
    four(fours, x);
    each(N, [&](Slot i) { sums[i.k] = fmaf(unit * row_unit(i.k / 4), x[i.k], sums[i.k]); });
  }
  // Loads two's complement: sets each byte's upper bits to a code plus half the number of codes. Returns
  // whether all are at least 1.
  template <int kBits>
  __device__ __forceinline__ bool load_integers(const uint8_t* bytes, uint32_t (&fours)[kRows]) const {
    constexpr uint32_t kOnes = 0xffffffffu / ((1u << kBits) - 1u), kTops = kOnes << (kBits - 1);
    uint32_t words[Words<kBits>::kWordRows], zeros = 0;
    load_words<kBits>(bytes, words);
#pragma unroll
    for (uint32_t& word : words) {
      const uint32_t flipped = word ^ kTops;
      zeros |= (flipped - kOnes) & word & kTops;
      word = flipped;
    }
    split_words<kBits>(words, 8 - kBits, fours);
    return zeros == 0;
  }
  // Returns `mine` of lane `at` % 32.
  template <typename T>
  __device__ __forceinline__ static T look_up(T mine, uint32_t at) {
    static_assert(kGroup == 32);
    return __shfl_sync(0xffffffffu, mine, static_cast<int>(at));
  }
  // Returns four bytes of a block, at a multiple of 4 from its beginning.
  __device__ __forceinline__ uint32_t word_at(const uint8_t* bytes) const {
    if constexpr (kReadOnly) {
      const auto* const words = reinterpret_cast<const uint32_t*>(bytes - skew);
      return __funnelshift_r(words[0], words[1], 8 * skew);
    } else {
      return bytes[0] | bytes[1] << 8 | bytes[2] << 16 | static_cast<uint32_t>(bytes[3]) << 24;
    }
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

  __device__ __forceinline__ void rotate(ReadValues<kHeld> values, int, float scale, HeldValues to) const {
    each(N, [&](Slot i) { to[i] = bits_float(float_bits(values[i] * scale) ^ sign(i)); });
    hadamard(to.x);
  }
  __device__ __forceinline__ void rotate_back(HeldValues values, int) const {
    each(N, [&](Slot i) { values[i] *= kRotationDown; });
    hadamard(values.x);
    float none = 0.0f;  // a value overflows where it is above kRotationMost, which is rare
    each(N, [&](Slot i) { none = fmaf(values[i] *= kRotationUp, 0.0f, none); });
    if (none != 0.0f) each(N, [&](Slot i) { values[i] = within(values[i], kRotationMost * kRotationUp); });
    each(N, [&](Slot i) { values[i] = bits_float(float_bits(values[i]) ^ sign(i)); });
  }

  __device__ __forceinline__ uint32_t all_signs() const {
    uint32_t all = 0;
    each(N, [&](Slot i) { all |= rotation_sign(i) >> (31 - i.k); });
    return all;
  }

 private:
  __device__ __forceinline__ uint32_t sign(Slot i) const {
    return signs << (31 - i.k) & 0x80000000u;
  }
  // Returns the largest value among 4 to 32 neighboring lanes.
  __device__ __forceinline__ uint32_t max_over(int lanes, uint32_t largest) const {
    if (lanes == 32) return __reduce_max_sync(0xffffffffu, largest);
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
  // Packs bits [from, from + kBits) of the codes, of which a word of `fours` has four.
  template <int kBits>
  __device__ __forceinline__ void pack_words(const uint32_t* fours, int from, uint8_t* bytes) const {
    using W = Words<kBits>;
    constexpr uint32_t kMask = ((1u << kBits) - 1u) * 0x01010101u;
    uint32_t words[W::kWordRows] = {};
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      words[row % W::kWordRows] |= (fours[row] >> from & kMask) << (kBits * part_of<kBits>(row));
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
  __device__ __forceinline__ void unpack_rows(const uint8_t* bytes, uint32_t* fours) const {
    constexpr int kLower = lower_code_bits(kBits), kUpper = kBits - kLower;
    unpack_words<kLower>(bytes, 0, fours);
    if constexpr (kUpper > 0) unpack_words<kUpper>(bytes + code_bytes<kLower>(N), kLower, fours);
  }
  template <int kBits>
  __device__ __forceinline__ void unpack_words(const uint8_t* bytes, int to, uint32_t* fours) const {
    uint32_t words[Words<kBits>::kWordRows];
    load_words<kBits>(bytes, words);
    split_words<kBits>(words, to, fours);
  }
  template <int kBits>
  __device__ __forceinline__ void load_words(const uint8_t* bytes, uint32_t* words) const {
    using W = Words<kBits>;
#pragma unroll
    for (int row = 0; row < W::kWordRows; ++row)
      words[row] = word_at(bytes + (W::kSharers > 1 ? first() % W::kBytes : first() + row * kRow));
  }
  template <int kBits>
  __device__ __forceinline__ void split_words(const uint32_t* words, int to, uint32_t* fours) const {
    constexpr uint32_t kMask = ((1u << kBits) - 1u) * 0x01010101u;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const uint32_t word = words[row % Words<kBits>::kWordRows];
      fours[row] |= (word >> (kBits * part_of<kBits>(row)) & kMask) << to;
    }
  }
};

}  // namespace
}  // namespace gradwire::cuda
