// FP32 on the wire: the values themselves, so the only op is a sum.
#pragma once

#include <cstdint>

#include "kernels/op.h"
#include "kernels/wire/format.h"

namespace gradwire {

// Arguments of a sum: out = scale * (inputs[0..own_position) + own + inputs[own_position..num_inputs)), in
// FP32, added in this order. Without inputs, the op is a scaled copy. Each term has a scale, as in
// ReduceEncode. Bytes per element: 8 + 4 * num_inputs. Limit: memory bandwidth. Alignment: any.
// Deterministic.
struct Reduce {
  const float* inputs[kMaxInputs] = {};  // (count) floats each
  InputScales input_scales = {};
  int num_inputs = 0;
  int own_position = 0;        // 0..num_inputs
  const float* own = nullptr;  // (count)
  float* out = nullptr;        // (count); may equal own or any of the inputs
  float own_scale = 1.0f;
  float scale = 1.0f;
  int64_t count = 0;
  GW_HD float input_scale(int k) const { return input_scales.of[k]; }
};
GW_OP(fp32_reduce, Reduce)

}  // namespace gradwire
