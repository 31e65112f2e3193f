// 16-bit floats in the caller's memory, which are summed as FP32: widened before a collective, rounded after
// it.
//
// FP16 is not a wire format: it would break two promises of wire formats (format.h, part_scale.h). Values
// beyond 65504 would saturate and stay in the residual, unseen by loss scaling. Below 2^-14 a power-of-two
// scale, which sums of parts use on the wire, changes how a value is rounded.
//
// Bytes per element: 6. Limit: memory bandwidth. Alignment: any; all accesses are 16 bytes wide when both
// arrays share a head (kernels/cuda/vector.cuh). Deterministic.
#pragma once

#include "kernels/op.h"
#include "kernels/wire/bf16.h"
#include "runtime/device/dtype.h"

namespace gradwire {

struct Fp16Widen {
  const uint16_t* halves = nullptr;  // (count)
  float* out = nullptr;              // (count)
  int64_t count = 0;
};

// Arguments of rounding to FP16: rounds to nearest; values beyond FP16's range become infinity.
struct Fp16Narrow {
  const float* values = nullptr;  // (count)
  uint16_t* out = nullptr;        // (count)
  int64_t count = 0;
};

GW_OP(fp16_widen, Fp16Widen)

GW_OP(fp16_narrow, Fp16Narrow)

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
