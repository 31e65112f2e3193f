// BF16 wire format: the four ops a compressed allreduce needs, with error feedback fused in.
//
// S below is the value a rank wants to send: its gradient, plus the residual it kept last time, plus whatever
// arrived from other ranks. The wire carries round(S); the residual becomes S - round(S), so nothing is lost:
//     round(S) + residual_new == S, exactly (the difference of a float and its BF16 rounding is
//     representable, except where it underflows FP32).
//
// Non-finite S: the wire carries it (the user must see it), the residual becomes 0 (it must not spread in
// time). A finite S never becomes infinite on the wire: it saturates, and the residual keeps the rest.
//
// Stochastic rounding draws its bits from random16(seed, *step, element index) of kernels/math/random.h, so a
// rank's results are reproducible; give each rank its own seed. `first_element` is the index of element 0 of
// this call within the whole bucket, so that splitting a call in pieces changes nothing.
//
// Alignment: any element alignment (4 bytes for float, 2 for wire) is correct; 16 bytes is fast.
// Limit: memory bandwidth. Deterministic: yes, all four.
#pragma once

#include <cstdint>

#include "kernels/op.h"

namespace gradwire {

enum class Rounding : uint8_t { nearest, stochastic };

struct Bf16Rounding {
  Rounding mode = Rounding::nearest;
  uint64_t seed = 0;
  const uint64_t* step = nullptr;  // device memory; null means 0
  int64_t first_element = 0;
};

// wire = round(grad + residual); residual = (grad + residual) - wire; out = scale * wire.
// Bytes per element: 14 with residual (read 4+4, write 2+4), 6 without; +4 when out is given and is not in
// cache.
struct Bf16Encode {
  const float* grad = nullptr;  // (count)
  float* residual = nullptr;    // (count) in and out; null: no error feedback, the rounding error is dropped
  uint16_t* wire = nullptr;     // (count) out
  float* out = nullptr;  // (count) optional; may equal grad: what every rank will decode from this wire
  float out_scale = 1.0f;
  int64_t count = 0;
  Bf16Rounding rounding = {};
};
GW_DECLARE_OP(bf16_encode, Bf16Encode)

// out = scale * wire. Bytes per element: 6.
struct Bf16Decode {
  const uint16_t* wire = nullptr;  // (count)
  float* out = nullptr;            // (count)
  float scale = 1.0f;
  int64_t count = 0;
};
GW_DECLARE_OP(bf16_decode, Bf16Decode)

// acc += wire. Bytes per element: 10.
struct Bf16DecodeAdd {
  const uint16_t* wire = nullptr;  // (count)
  float* acc = nullptr;            // (count) in and out
  int64_t count = 0;
};
GW_DECLARE_OP(bf16_decode_add, Bf16DecodeAdd)

// A hop of a reduction in one pass: S = sum of the inputs and of (grad + residual), summed in FP32 one after
// the other in the order inputs[0..own_position), own, inputs[own_position..num_inputs); then as in
// bf16_encode. The order is part of the contract: it makes every transport and device give the same bits.
// Bytes per element: 14 + 2 * num_inputs with residual.
inline constexpr int kMaxHopInputs = 64;
struct Bf16DecodeAddEncode {
  const uint16_t* inputs[kMaxHopInputs] = {};  // each (count)
  int num_inputs = 0;                          // 0..kMaxHopInputs
  int own_position = 0;                        // 0..num_inputs
  const float* grad = nullptr;                 // (count)
  float* residual = nullptr;                   // (count) in and out; null: no error feedback
  uint16_t* wire = nullptr;                    // (count) out
  float* out = nullptr;  // (count) optional, may equal grad: scale * what this wire decodes to
  float out_scale = 1.0f;
  int64_t count = 0;
  Bf16Rounding rounding = {};
};
GW_DECLARE_OP(bf16_decode_add_encode, Bf16DecodeAddEncode)

}  // namespace gradwire
