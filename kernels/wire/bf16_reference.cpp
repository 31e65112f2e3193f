// Scalar reference of the BF16 and FP32 wire formats: one element after the other, as the headers say it.
#include "kernels/math/bf16.h"
#include "kernels/math/random.h"
#include "kernels/wire/bf16.h"
#include "kernels/wire/fp32.h"

namespace gradwire::reference {
namespace {

uint16_t round_to_bf16(float s, const Bf16Rounding& rounding, int64_t i) {
  if (rounding.mode == Rounding::nearest) return float_to_bf16_nearest(s);
  uint64_t step = rounding.step != nullptr ? *rounding.step : 0;
  return float_to_bf16_stochastic(
      s, random16(rounding.seed, step, static_cast<uint64_t>(rounding.first_element + i)));
}

}  // namespace

void bf16_encode(const Bf16Encode& a) {
  for (int64_t i = 0; i < a.count; ++i) {
    float s = a.residual != nullptr ? a.grad[i] + a.residual[i] : a.grad[i];
    uint16_t wire = round_to_bf16(s, a.rounding, i);
    float sent = bf16_to_float(wire);
    if (a.residual != nullptr) a.residual[i] = is_finite(s) ? s - sent : 0.0f;
    a.wire[i] = wire;
    if (a.out != nullptr) a.out[i] = a.out_scale * sent;
  }
}

void bf16_decode(const Bf16Decode& a) {
  for (int64_t i = 0; i < a.count; ++i) a.out[i] = a.scale * bf16_to_float(a.wire[i]);
}

void bf16_decode_add(const Bf16DecodeAdd& a) {
  for (int64_t i = 0; i < a.count; ++i) a.acc[i] += bf16_to_float(a.wire[i]);
}

void bf16_decode_add_encode(const Bf16DecodeAddEncode& a) {
  for (int64_t i = 0; i < a.count; ++i) {
    float own = a.residual != nullptr ? a.grad[i] + a.residual[i] : a.grad[i];
    float s = 0.0f;
    for (int term = 0; term <= a.num_inputs; ++term) {
      float x =
          term == a.own_position ? own : bf16_to_float(a.inputs[term < a.own_position ? term : term - 1][i]);
      s = term == 0 ? x : s + x;
    }
    uint16_t wire = round_to_bf16(s, a.rounding, i);
    float sent = bf16_to_float(wire);
    if (a.residual != nullptr) a.residual[i] = is_finite(s) ? s - sent : 0.0f;
    a.wire[i] = wire;
    if (a.out != nullptr) a.out[i] = a.out_scale * sent;
  }
}

void fp32_reduce(const Fp32Reduce& a) {
  for (int64_t i = 0; i < a.count; ++i) {
    float s = 0.0f;
    for (int term = 0; term <= a.num_inputs; ++term) {
      float x = term == a.own_position ? a.acc[i] : a.inputs[term < a.own_position ? term : term - 1][i];
      s = term == 0 ? x : s + x;
    }
    a.acc[i] = a.scale * s;
  }
}

}  // namespace gradwire::reference
