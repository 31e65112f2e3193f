// Block-scaled FP8 wire format: E4M3 codes, one power-of-two scale per 128 values (kernels/math/fp8.h), and
// the same four ops as BF16, with error feedback fused in.
//
// A wire of `count` values is fp8_wire_bytes(count) long: count codes, padding to a multiple of 16, then one
// scale byte per block of 128 values, the last block perhaps short. 1.0078 bytes per value.
//
// S is what a rank wants to send, as in kernels/wire/bf16.h. The wire carries round(S); the residual becomes S -
// round(S), exactly with round to nearest, to FP32 rounding with stochastic. Values far below their block's
// largest round to zero and wait in the residual.
//
// Non-finite S: NaN and Inf both travel as NaN, and their residual becomes 0; they do not touch the scale, so
// the other values of the block keep their precision. A finite S never becomes NaN.
//
// Alignment: any for floats (16 bytes is fast); wires 16 bytes. Limit: memory bandwidth. Deterministic.
#pragma once

#include <cstdint>

#include "kernels/math/fp8.h"
#include "kernels/wire/bf16.h"

namespace gradwire {

GW_HD int64_t fp8_scales_offset(int64_t count) {
  return (count + 15) / 16 * 16;
}
GW_HD int64_t fp8_wire_bytes(int64_t count) {
  return fp8_scales_offset(count) + (count + kFp8Block - 1) / kFp8Block;
}

// wire = round(grad + residual); residual = (grad + residual) - wire; out = scale * wire.
// Bytes per element: 13 with residual, 5 without; +4 with out.
struct Fp8Encode {
  const float* grad = nullptr;  // (count)
  float* residual = nullptr;    // (count) in and out; null: no error feedback
  uint8_t* wire = nullptr;      // fp8_wire_bytes(count) out
  float* out = nullptr;         // (count) optional, may equal grad
  float out_scale = 1.0f;
  int64_t count = 0;
  Bf16Rounding rounding = {};
};
GW_DECLARE_OP(fp8_encode, Fp8Encode)

// out = scale * wire. Bytes per element: 5.
struct Fp8Decode {
  const uint8_t* wire = nullptr;
  float* out = nullptr;
  float scale = 1.0f;
  int64_t count = 0;
};
GW_DECLARE_OP(fp8_decode, Fp8Decode)

// acc += wire. Bytes per element: 9.
struct Fp8DecodeAdd {
  const uint8_t* wire = nullptr;
  float* acc = nullptr;
  int64_t count = 0;
};
GW_DECLARE_OP(fp8_decode_add, Fp8DecodeAdd)

// A hop of a reduction in one pass; the order of additions is that of bf16_decode_add_encode.
// Bytes per element: 13 + num_inputs with residual.
struct Fp8DecodeAddEncode {
  const uint8_t* inputs[kMaxHopInputs] = {};  // each fp8_wire_bytes(count)
  int num_inputs = 0;
  int own_position = 0;
  const float* grad = nullptr;
  float* residual = nullptr;
  uint8_t* wire = nullptr;
  float* out = nullptr;
  float out_scale = 1.0f;
  int64_t count = 0;
  Bf16Rounding rounding = {};
};
GW_DECLARE_OP(fp8_decode_add_encode, Fp8DecodeAddEncode)

}  // namespace gradwire
