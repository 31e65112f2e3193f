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
GW_INLINE void decode_to(const From& from, int count, const To& to, float* buffer) {
  const OneLane lanes;
  if constexpr (requires { F::decode(lanes, from, count, to); }) {
    F::decode(lanes, from, count, to);
  } else {
    F::decode(lanes, from, count, buffer);
    lanes.each(count, [=](int i) GW_HD_LAMBDA { to[i] = buffer[i]; });
  }
}

// S of block `block`, as format.h has it.
template <typename F>
GW_INLINE void sum_block(const ReduceEncode& a, int64_t block, int count, float* __restrict s,
                         float* __restrict own, float* __restrict x) {
  const OneLane lanes;
  const float* grad = a.own + block * F::kBlock;
  const float* kept = a.residual != nullptr ? a.residual + block * F::kBlock : nullptr;
  float* const first = a.own_position == 0 ? s : own;
  if (kept != nullptr) {
    lanes.each(count, [=](int i) GW_HD_LAMBDA { first[i] = grad[i] + kept[i]; });
  } else {
    lanes.each(count, [=](int i) GW_HD_LAMBDA { first[i] = grad[i]; });
  }
  for (int input = 0; input < a.num_inputs; ++input) {
    const auto from = F::place(static_cast<const uint8_t*>(a.inputs[input]), a.count, block);
    if (input == 0 && a.own_position > 0) {
      F::decode(lanes, from, count, s);
      continue;
    }
    if (input == a.own_position && input > 0) {
      lanes.each(count, [=](int i) GW_HD_LAMBDA { s[i] += own[i]; });
    }
    decode_to<F>(from, count, Adding{s}, x);
  }
  if (a.own_position == a.num_inputs && a.num_inputs > 0) {
    lanes.each(count, [=](int i) GW_HD_LAMBDA { s[i] += own[i]; });
  }
}

// Blocks [first, last). For a GW_SIMD function to call.
template <typename F>
GW_INLINE void reduce_encode_blocks(const ReduceEncode& a, int64_t first, int64_t last) {
  const OneLane lanes;
  alignas(64) float s[F::kBlock] = {}, own[F::kBlock], sent[F::kBlock];
  uint16_t buffer[random_buffer(F::kBlock)];
  const uint64_t step = step_of(a.rounding);
  for (int64_t block = first; block < last; ++block) {
    const int64_t begin = block * F::kBlock;
    const int count = static_cast<int>(std::min<int64_t>(F::kBlock, a.count - begin));
    if (count < F::kBlock) memset(s, 0, sizeof s);  // the last block's padding
    sum_block<F>(a, block, count, s, own, sent);

    float* const residual = a.residual != nullptr ? a.residual + begin : nullptr;
    float* const out = a.out != nullptr ? a.out + begin : nullptr;
    const float scale = a.out_scale;
    if (a.wire == nullptr) {
      lanes.each(count, [=, &s](int i) GW_HD_LAMBDA { out[i] = scale * s[i]; });
      if (residual != nullptr) memset(residual, 0, static_cast<size_t>(count) * sizeof(float));
      continue;
    }
    auto* const wire = static_cast<uint8_t*>(a.wire);
    if (a.rounding.mode == Rounding::nearest) {
      F::encode(lanes, s, count, nullptr, F::place(wire, a.count, block));
    } else {
      const auto element = static_cast<uint64_t>(a.rounding.first_element + begin);
      F::encode(lanes, s, count, random_bits(a.rounding.seed, step, element, F::kBlock, buffer),
                F::place(wire, a.count, block));
    }
    if (residual == nullptr && out == nullptr) continue;
    F::decode(lanes, F::place(static_cast<const uint8_t*>(wire), a.count, block), count, sent);
    if (residual != nullptr) {
      lanes.each(count, [=, &s, &sent](int i)
                            GW_HD_LAMBDA { residual[i] = is_finite(s[i]) ? s[i] - sent[i] : 0.0f; });
    }
    if (out != nullptr) lanes.each(count, [=, &sent](int i) GW_HD_LAMBDA { out[i] = scale * sent[i]; });
  }
}

template <typename F>
GW_INLINE void decode_blocks(const Decode& a, int64_t first, int64_t last) {
  alignas(64) float buffer[F::kBlock];
  for (int64_t block = first; block < last; ++block) {
    const int64_t begin = block * F::kBlock;
    const int count = static_cast<int>(std::min<int64_t>(F::kBlock, a.count - begin));
    decode_to<F>(F::place(static_cast<const uint8_t*>(a.wire), a.count, block), count,
                 Scaling{a.out + begin, a.scale}, buffer);
  }
}

// Calls piece(first, last) over the blocks of `count` values, from several threads.
template <typename F, typename Piece>
void for_block_pieces(int64_t count, const Piece& piece) {
  constexpr int64_t kPerPiece = 32 * 1024 / F::kBlock;
  parallel_for((count + F::kBlock - 1) / F::kBlock, kPerPiece, piece);
}

// Defines NAME_reduce_encode and NAME_decode for format F.
#define GW_BLOCK_FORMAT_HOST(F, NAME)                                                                        \
  static GW_SIMD void NAME##_reduce_encode_piece(const ReduceEncode& a, int64_t first, int64_t last) {       \
    reduce_encode_blocks<F>(a, first, last);                                                                 \
  }                                                                                                          \
  static GW_SIMD void NAME##_decode_piece(const Decode& a, int64_t first, int64_t last) {                    \
    decode_blocks<F>(a, first, last);                                                                        \
  }                                                                                                          \
  void NAME##_reduce_encode(const ReduceEncode& a) {                                                         \
    for_block_pieces<F>(a.count,                                                                             \
                        [&](int64_t first, int64_t last) { NAME##_reduce_encode_piece(a, first, last); });   \
  }                                                                                                          \
  void NAME##_decode(const Decode& a) {                                                                      \
    for_block_pieces<F>(a.count, [&](int64_t first, int64_t last) { NAME##_decode_piece(a, first, last); }); \
  }

}  // namespace gradwire::host
