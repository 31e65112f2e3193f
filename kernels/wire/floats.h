// FP32 on the wire: the values themselves, so the only op is a sum.
#pragma once

#include <cstdint>

#include "kernels/op.h"
#include "kernels/passes/passes.h"
#include "kernels/wire/format.h"
#include "runtime/device/device.h"

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

// BF16 on the wire: the upper half of a float (kernels/math/small_float.h), 2 bytes per value.
//
// wire + residual == S exactly, in both rounding modes: the difference of a float and its BF16 rounding is a
// float, except where it underflows.
//
// Encoded arrays may start at any 2-byte address; 16-byte alignment is fast. The ops therefore also convert
// arrays between FP32 and BF16: a ReduceEncode without inputs and residual, which moves 6 bytes per element.

GW_OP(bf16_reduce_encode, ReduceEncode)

GW_OP(bf16_decode, Decode)

// Widens `from` (count), of type bf16 or f16, to `out` (count).
inline void widen(const Stream& stream, DType dtype, const void* from, float* out, int64_t count) {
  if (dtype == DType::f16) {
    fp16_widen(stream, {.halves = static_cast<const uint16_t*>(from), .out = out, .count = count});
  } else {
    bf16_decode(stream, {.wire = from, .out = out, .count = count});
  }
}
inline void narrow(const Stream& stream, DType dtype, const float* from, void* out, int64_t count) {
  if (dtype == DType::f16) {
    fp16_narrow(stream, {.values = from, .out = static_cast<uint16_t*>(out), .count = count});
  } else {
    bf16_reduce_encode(stream, {.own = from, .wire = out, .count = count});
  }
}

}  // namespace gradwire
