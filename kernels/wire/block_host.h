// Formats in blocks on the host: blocks are independent, so pieces of whole blocks go to threads, and what a
// format does with a block's values vectorizes.
#pragma once

#include "kernels/math/bf16.h"
#include "kernels/wire/block.h"
#include "kernels/wire/host.h"
#include "runtime/thread_pool.h"

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

// Destinations of decode: what is assigned is added to sums[i], or goes scaled to out[i].
struct Adding {
  float* sums;
  struct At {
    float& sum;
    GW_INLINE void operator=(float value) const { sum += value; }
  };
  GW_INLINE At operator[](int i) const { return {sums[i]}; }
};
struct Scaling {
  float* out;
  float scale;
  struct At {
    float &out, scale;
    GW_INLINE void operator=(float value) const { out = scale * value; }
  };
  GW_INLINE At operator[](int i) const { return {out[i], scale}; }
};

// Decodes to `to`; by way of `buffer` where the format wants memory.
template <typename F, typename From, typename To>
GW_INLINE void decode_to(const BlockCoder<F>& coder, const From& from, int count, const To& to,
                         float* buffer) {
  const OneLane lanes;
  if constexpr (requires { coder.format.decode(lanes, from, count, to); }) {
    if (!coder.rotates()) {
      coder.format.decode(lanes, from, count, to);
      return;
    }
  }
  coder.decode(lanes, from, count, buffer);
  lanes.each(count, [=](int i) GW_HD_LAMBDA { to[i] = buffer[i]; });
}

// S of block `block`, as format.h has it.
template <typename F>
GW_INLINE void sum_block(const BlockCoder<F>& coder, const ReduceEncode& a, int64_t block, int count,
                         float* __restrict s, float* __restrict own, float* __restrict x) {
  const OneLane lanes;
  const int64_t begin = block * coder.block();
  const float* grad = a.own + begin;
  const float* kept = a.residual != nullptr ? a.residual + begin : nullptr;
  float* const first = a.own_position == 0 ? s : own;
  if (kept != nullptr) {
    lanes.each(count, [=](int i) GW_HD_LAMBDA { first[i] = grad[i] + kept[i]; });
  } else {
    lanes.each(count, [=](int i) GW_HD_LAMBDA { first[i] = grad[i]; });
  }
  for (int input = 0; input < a.num_inputs; ++input) {
    const auto from = coder.place(static_cast<const uint8_t*>(a.inputs[input]), a.count, block);
    if (input == 0 && a.own_position > 0) {
      coder.decode(lanes, from, count, s);
      continue;
    }
    if (input == a.own_position && input > 0) {
      lanes.each(count, [=](int i) GW_HD_LAMBDA { s[i] += own[i]; });
    }
    decode_to(coder, from, count, Adding{s}, x);
  }
  if (a.own_position == a.num_inputs && a.num_inputs > 0) {
    lanes.each(count, [=](int i) GW_HD_LAMBDA { s[i] += own[i]; });
  }
}

// Blocks [first, last). For a GW_SIMD function to call, with a coder of its own, whose options then stay in
// registers.
template <typename F>
GW_INLINE void reduce_encode_blocks(const BlockCoder<F>& coder, const ReduceEncode& a, int64_t first,
                                    int64_t last) {
  const OneLane lanes;
  alignas(64) float s[F::kMaxBlock], own[F::kMaxBlock], sent[F::kMaxBlock];
  uint16_t buffer[random_buffer(F::kMaxBlock)];
  const uint64_t step = step_of(a.rounding);
  const int block_size = coder.block();
  for (int64_t block = first; block < last; ++block) {
    const int64_t begin = block * block_size;
    const int count = static_cast<int>(std::min<int64_t>(block_size, a.count - begin));
    sum_block(coder, a, block, count, s, own, sent);
    // The last block's padding. Decoding a rotated block has left something there.
    if (count < block_size) memset(s + count, 0, static_cast<size_t>(block_size - count) * sizeof *s);

    float* const residual = a.residual != nullptr ? a.residual + begin : nullptr;
    float* const out = a.out != nullptr ? a.out + begin : nullptr;
    const float scale = a.out_scale;
    if (a.wire == nullptr) {
      lanes.each(count, [=, &s](int i) GW_HD_LAMBDA { out[i] = scale * s[i]; });
      if (residual != nullptr) memset(residual, 0, static_cast<size_t>(count) * sizeof(float));
      continue;
    }
    auto* const wire = static_cast<uint8_t*>(a.wire);
    const uint16_t* random = nullptr;
    if (F::kStochastic && a.rounding.mode == Rounding::stochastic) {
      const auto element = static_cast<uint64_t>(a.rounding.first_element + begin);
      random = random_bits(a.rounding.seed, step, element, block_size, buffer);
    }
    coder.encode(lanes, s, count, random, coder.place(wire, a.count, block), sent);
    if (residual == nullptr && out == nullptr) continue;
    coder.decode(lanes, coder.place(static_cast<const uint8_t*>(wire), a.count, block), count, sent);
    if (residual != nullptr) {
      lanes.each(count,
                 [=, &coder, &s, &sent](int i) GW_HD_LAMBDA { residual[i] = coder.rest_of(s[i], sent[i]); });
    }
    if (out != nullptr) lanes.each(count, [=, &sent](int i) GW_HD_LAMBDA { out[i] = scale * sent[i]; });
  }
}

template <typename F>
GW_INLINE void decode_blocks(const BlockCoder<F>& coder, const Decode& a, int64_t first, int64_t last) {
  alignas(64) float buffer[F::kMaxBlock];
  const int block_size = coder.block();
  for (int64_t block = first; block < last; ++block) {
    const int64_t begin = block * block_size;
    const int count = static_cast<int>(std::min<int64_t>(block_size, a.count - begin));
    decode_to(coder, coder.place(static_cast<const uint8_t*>(a.wire), a.count, block), count,
              Scaling{a.out + begin, a.scale}, buffer);
  }
}

// Calls piece(first, last) over the blocks of `count` values, from several threads.
template <typename F, typename Piece>
void for_block_pieces(const BlockCoder<F>& coder, int64_t count, const Piece& piece) {
  parallel_for(coder.blocks(count), std::max<int64_t>(1, 32 * 1024 / coder.block()), piece);
}

// Defines NAME_reduce_encode and NAME_decode for format F.
#define GW_BLOCK_FORMAT_HOST(F, NAME)                                                                       \
  static GW_SIMD void NAME##_reduce_encode_piece(BlockCoder<F> coder, const ReduceEncode& a, int64_t first, \
                                                 int64_t last) {                                            \
    reduce_encode_blocks(coder, a, first, last);                                                            \
  }                                                                                                         \
  static GW_SIMD void NAME##_decode_piece(BlockCoder<F> coder, const Decode& a, int64_t first,              \
                                          int64_t last) {                                                   \
    decode_blocks(coder, a, first, last);                                                                   \
  }                                                                                                         \
  void NAME##_reduce_encode(const BlockCoder<F>& coder, const ReduceEncode& a) {                            \
    for_block_pieces(coder, a.count, [&](int64_t first, int64_t last) {                                     \
      NAME##_reduce_encode_piece(coder, a, first, last);                                                    \
    });                                                                                                     \
  }                                                                                                         \
  void NAME##_decode(const BlockCoder<F>& coder, const Decode& a) {                                         \
    for_block_pieces(coder, a.count,                                                                        \
                     [&](int64_t first, int64_t last) { NAME##_decode_piece(coder, a, first, last); });     \
  }

}  // namespace gradwire::host
