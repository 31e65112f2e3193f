// FP32 wire format: the wire is the value itself, so only one op is left.
#pragma once

#include <cstdint>

#include "kernels/wire/bf16.h"

namespace gradwire {

// acc = scale * (inputs[0..own_position) + acc + inputs[own_position..num_inputs)), one addition after the
// other in that order. Bytes per element: 8 + 4 * num_inputs. Limit: memory bandwidth. Any 4-byte alignment.
struct Fp32Reduce {
  const float* inputs[kMaxHopInputs] = {};  // each (count)
  int num_inputs = 0;
  int own_position = 0;
  float* acc = nullptr;  // (count) in and out
  float scale = 1.0f;
  int64_t count = 0;
};
GW_DECLARE_OP(fp32_reduce, Fp32Reduce)

}  // namespace gradwire
