// Scalar reference of the block-scaled FP8 wire format: block by block, value by value, as the header says
// it.
#include <algorithm>

#include "kernels/math/random.h"
#include "kernels/wire/fp8.h"

namespace gradwire::reference {
namespace {

float decode_one(const uint8_t* wire, int64_t count, int64_t i) {
  return e4m3_to_float(wire[i]) * fp8_scale(wire[fp8_scales_offset(count) + i / kFp8Block]);
}

uint8_t round_one(float scaled, const Bf16Rounding& rounding, int64_t i) {
  if (rounding.mode == Rounding::nearest) return float_to_e4m3_nearest(scaled);
  uint64_t step = rounding.step != nullptr ? *rounding.step : 0;
  return float_to_e4m3_stochastic(
      scaled, random16(rounding.seed, step, static_cast<uint64_t>(rounding.first_element + i)));
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
  for (int64_t i = 0; i < a.count; ++i) a.out[i] = a.scale * decode_one(a.wire, a.count, i);
}

void fp8_decode_add(const Fp8DecodeAdd& a) {
  for (int64_t i = 0; i < a.count; ++i) a.acc[i] += decode_one(a.wire, a.count, i);
}

void fp8_decode_add_encode(const Fp8DecodeAddEncode& a) {
  for (int64_t begin = 0; begin < a.count; begin += kFp8Block) {
    int64_t end = std::min<int64_t>(a.count, begin + kFp8Block);
    float sums[kFp8Block];
    uint32_t largest = 0;
    for (int64_t i = begin; i < end; ++i) {
      float own = a.residual != nullptr ? a.grad[i] + a.residual[i] : a.grad[i];
      float s = 0.0f;
      for (int term = 0; term <= a.num_inputs; ++term) {
        float x = term == a.own_position
                      ? own
                      : decode_one(a.inputs[term < a.own_position ? term : term - 1], a.count, i);
        s = term == 0 ? x : s + x;
      }
      sums[i - begin] = s;
      largest = std::max(largest, finite_magnitude_bits(s));
    }
    uint8_t scale = fp8_scale_byte(largest);
    a.wire[fp8_scales_offset(a.count) + begin / kFp8Block] = scale;
    for (int64_t i = begin; i < end; ++i) {
      float s = sums[i - begin];
      uint8_t code = round_one(s * fp8_inverse_scale(scale), a.rounding, i);
      float sent = e4m3_to_float(code) * fp8_scale(scale);
      if (a.residual != nullptr) a.residual[i] = is_finite(s) ? s - sent : 0.0f;
      a.wire[i] = code;
      if (a.out != nullptr) a.out[i] = a.out_scale * sent;
    }
  }
}

}  // namespace gradwire::reference
