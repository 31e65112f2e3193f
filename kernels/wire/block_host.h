// Formats in blocks on the host. What a format does with its blocks' values is compiled for each instruction set;
// sums, residuals, random bits and threads are the same for all formats, and compiled once (block_host.cpp).
#pragma once

#include "kernels/math/bf16.h"
#include "kernels/wire/block.h"
#include "kernels/wire/host.h"

namespace gradwire::host {

struct OneLane {
  template <typename Body>
  GW_INLINE void each(int n, const Body& body) const {
#pragma omp simd
    for (int i = 0; i < n; ++i) body(i);
  }
  template <typename Value>
  GW_INLINE uint32_t max(int n, const Value& value) const {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int i = 0; i < n; ++i) {
      const uint32_t x = value(i);
      largest = x > largest ? x : largest;
    }
    return largest;
  }
  template <typename Value>
  GW_INLINE float sum(int n, const Value& value) const {
    float sums[kSumLanes] = {};
    for (int begin = 0; begin < n; begin += kSumLanes) {
      const int lanes = n - begin < kSumLanes ? n - begin : kSumLanes;
#pragma omp simd
      for (int l = 0; l < lanes; ++l) sums[l] += value(begin + l);
    }
    for (int half = kSumLanes / 2; half > 0; half /= 2) {
      for (int l = 0; l < half; ++l) sums[l] += sums[l + half];
    }
    return sums[0];
  }
  template <typename Test>
  GW_INLINE int count(int n, const Test& test) const {
    int all = 0;
#pragma omp simd reduction(+ : all)
    for (int i = 0; i < n; ++i) all += test(i) ? 1 : 0;
    return all;
  }
  template <typename Test, typename Take>
  GW_INLINE void pick(int n, const Test& test, const Take& take) const {
    int k = 0;
    for (int i = 0; i < n; ++i) {
      if (test(i)) take(k++, i);
    }
  }
  // n is a power of two, 16 at least.
  GW_INLINE void hadamard(float* x, int n) const {
    for (int h = n / 2; h >= kWidth; h /= 2) {
      for (int begin = 0; begin < n; begin += 2 * h) {
        for (int i = begin; i < begin + h; i += kWidth) {
          const F32x8 a = load<F32x8>(x + i), b = load<F32x8>(x + i + h);
          store(x + i, a + b);
          store(x + i + h, a - b);
        }
      }
    }
    static_assert(kWidth == 8);
    // Within a vector: a lane's partner is added, or the lane subtracted from it; -1 * x is exact.
    for (int i = 0; i < n; i += kWidth) {
      F32x8 v = load<F32x8>(x + i);
      v = __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3) + v * F32x8{1, 1, 1, 1, -1, -1, -1, -1};
      v = __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5) + v * F32x8{1, 1, -1, -1, 1, 1, -1, -1};
      v = __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6) + v * F32x8{1, -1, 1, -1, 1, -1, 1, -1};
      store(x + i, v);
    }
  }
};

// Blocks [first, last) of a wire of `count` values. `values` begins with those of block `first`.
struct HostBlocks {
  const void* coder;  // a BlockCoder<F>
  int block;          // values of one
  int max_block;
  bool stochastic, may_send_nan;  // see BlockCoder
  // values, which are 0 after `count`, to wire. `random` as in block.h, for all values.
  void (*encode)(const void* coder, const float* values, int64_t count, int64_t first, int64_t last,
                 const uint16_t* random, uint8_t* wire);
  // wire to values, which have room for whole blocks.
  void (*decode)(const void* coder, const uint8_t* wire, int64_t count, int64_t first, int64_t last,
                 float* values);
};
void reduce_encode_blocks(const HostBlocks& format, const ReduceEncode& a);
void decode_blocks(const HostBlocks& format, const Decode& a);

// The values of block `block` that there are.
template <typename F>
GW_INLINE int values_in(const BlockCoder<F>& coder, int64_t count, int64_t block) {
  const int64_t left = count - block * coder.block();
  return left < coder.block() ? static_cast<int>(left) : coder.block();
}

// For GW_SIMD functions to call, with a coder of their own, whose options then stay in registers.
template <typename F>
GW_INLINE void encode_each(const BlockCoder<F> coder, const float* values, int64_t count, int64_t first,
                           int64_t last, const uint16_t* random, uint8_t* wire) {
  alignas(64) float scratch[F::kMaxBlock];
  const int n = coder.block();
  for (int64_t block = first; block < last; ++block) {
    coder.encode(OneLane(), values, values_in(coder, count, block), random, coder.place(wire, count, block),
                 scratch);
    values += n;
    if (random != nullptr) random += n;
  }
}
template <typename F>
GW_INLINE void decode_each(const BlockCoder<F> coder, const uint8_t* wire, int64_t count, int64_t first,
                           int64_t last, float* values) {
  const int n = coder.block();
  for (int64_t block = first; block < last; ++block, values += n) {
    coder.decode(OneLane(), coder.place(wire, count, block), values_in(coder, count, block), values);
  }
}

// Defines NAME_reduce_encode and NAME_decode for format F.
#define GW_BLOCK_FORMAT_HOST(F, NAME)                                                                 \
  static GW_SIMD void NAME##_encode_each(const void* coder, const float* values, int64_t count,       \
                                         int64_t first, int64_t last, const uint16_t* random,         \
                                         uint8_t* wire) {                                             \
    encode_each(*static_cast<const BlockCoder<F>*>(coder), values, count, first, last, random, wire); \
  }                                                                                                   \
  static GW_SIMD void NAME##_decode_each(const void* coder, const uint8_t* wire, int64_t count,       \
                                         int64_t first, int64_t last, float* values) {                \
    decode_each(*static_cast<const BlockCoder<F>*>(coder), wire, count, first, last, values);         \
  }                                                                                                   \
  static HostBlocks NAME##_blocks(const BlockCoder<F>& coder) {                                       \
    return {&coder,                                                                                   \
            coder.block(),                                                                            \
            F::kMaxBlock,                                                                             \
            F::kStochastic,                                                                           \
            coder.may_send_nan(),                                                                     \
            NAME##_encode_each,                                                                       \
            NAME##_decode_each};                                                                      \
  }                                                                                                   \
  void NAME##_reduce_encode(const BlockCoder<F>& coder, const ReduceEncode& a) {                      \
    reduce_encode_blocks(NAME##_blocks(coder), a);                                                    \
  }                                                                                                   \
  void NAME##_decode(const BlockCoder<F>& coder, const Decode& a) {                                   \
    decode_blocks(NAME##_blocks(coder), a);                                                           \
  }

}  // namespace gradwire::host
