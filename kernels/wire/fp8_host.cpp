// The block-scaled FP8 wire format on the host: blocks are independent, so pieces of whole blocks go to
// threads, and the loops over a block's 128 values vectorize.
#include "kernels/wire/fp8.h"

#include <algorithm>

#include "kernels/math/random.h"
#include "kernels/simd/simd.h"
#include "runtime/thread_pool.h"

namespace gradwire::host {
namespace {

constexpr int64_t kBlocksPerPiece = 256;

GW_SIMD void decode_block(const uint8_t* codes, float scale, float* __restrict out, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = scale * e4m3_to_float(codes[i]);
}

GW_SIMD void add_block(const uint8_t* codes, float scale, float* __restrict acc, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) acc[i] += scale * e4m3_to_float(codes[i]);
}

GW_SIMD void own_block(const float* grad, const float* residual, float* __restrict own, int64_t count) {
  if (residual == nullptr) {
    for (int64_t i = 0; i < count; ++i) own[i] = grad[i];
  } else {
    for (int64_t i = 0; i < count; ++i) own[i] = grad[i] + residual[i];
  }
}

GW_SIMD void sum_blocks(const float* x, float* __restrict s, int64_t count) {
  for (int64_t i = 0; i < count; ++i) s[i] += x[i];
}

GW_SIMD uint32_t largest_of(const float* s, int64_t count) {
  uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits = finite_magnitude_bits(s[i]);
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

GW_SIMD void round_block_nearest(const float* s, float inverse, uint8_t* __restrict codes, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) codes[i] = float_to_e4m3_nearest(s[i] * inverse);
}

GW_SIMD void residual_block(const float* s, const float* sent, float* __restrict residual, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) residual[i] = is_finite(s[i]) ? s[i] - sent[i] : 0.0f;
}

GW_SIMD void scale_block(const float* sent, float scale, float* __restrict out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = scale * sent[i];
}

float block_scale(const uint8_t* wire, int64_t count, int64_t begin) {
  return fp8_scale(wire[fp8_scales_offset(count) + begin / kFp8Block]);
}

// Calls body(begin, count of this block) for every block, from several threads.
template <typename Body>
void for_each_block(int64_t count, const Body& body) {
  int64_t blocks = (count + kFp8Block - 1) / kFp8Block;
  parallel_for(blocks, kBlocksPerPiece, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      body(b * kFp8Block, std::min<int64_t>(kFp8Block, count - b * kFp8Block));
    }
  });
}

}  // namespace

void fp8_encode(const Fp8Encode& a) {
  fp8_decode_add_encode({.grad = a.grad,
                         .residual = a.residual,
                         .wire = a.wire,
                         .out = a.out,
                         .out_scale = a.out_scale,
                         .count = a.count,
                         .rounding = a.rounding});
}

void fp8_decode(const Fp8Decode& a) {
  for_each_block(a.count, [&](int64_t begin, int64_t count) {
    decode_block(a.wire + begin, block_scale(a.wire, a.count, begin), a.out + begin, count);
    if (a.scale != 1.0f) scale_block(a.out + begin, a.scale, a.out + begin, count);
  });
}

void fp8_decode_add(const Fp8DecodeAdd& a) {
  for_each_block(a.count, [&](int64_t begin, int64_t count) {
    add_block(a.wire + begin, block_scale(a.wire, a.count, begin), a.acc + begin, count);
  });
}

void fp8_decode_add_encode(const Fp8DecodeAddEncode& a) {
  const uint64_t step = a.rounding.step != nullptr ? *a.rounding.step : 0;
  for_each_block(a.count, [&](int64_t begin, int64_t count) {
    alignas(64) float s[kFp8Block], own[kFp8Block], sent[kFp8Block];
    const float* residual = a.residual != nullptr ? a.residual + begin : nullptr;
    own_block(a.grad + begin, residual, a.own_position == 0 ? s : own, count);
    for (int input = 0; input < a.num_inputs; ++input) {
      const uint8_t* wire = a.inputs[input];
      if (input == a.own_position && input > 0) sum_blocks(own, s, count);
      if (input == 0 && a.own_position > 0) {
        decode_block(wire + begin, block_scale(wire, a.count, begin), s, count);
      } else {
        add_block(wire + begin, block_scale(wire, a.count, begin), s, count);
      }
    }
    if (a.own_position == a.num_inputs && a.num_inputs > 0) sum_blocks(own, s, count);

    uint8_t scale = fp8_scale_byte(largest_of(s, count));
    a.wire[fp8_scales_offset(a.count) + begin / kFp8Block] = scale;
    uint8_t* codes = a.wire + begin;
    if (a.rounding.mode == Rounding::nearest) {
      round_block_nearest(s, fp8_inverse_scale(scale), codes, count);
    } else {
      for (int64_t i = 0; i < count; ++i) {
        uint64_t element = static_cast<uint64_t>(a.rounding.first_element + begin + i);
        codes[i] = float_to_e4m3_stochastic(s[i] * fp8_inverse_scale(scale),
                                            random16(a.rounding.seed, step, element));
      }
    }
    decode_block(codes, fp8_scale(scale), sent, count);
    if (a.residual != nullptr) residual_block(s, sent, a.residual + begin, count);
    if (a.out != nullptr) scale_block(sent, a.out_scale, a.out + begin, count);
  });
}

}  // namespace gradwire::host
