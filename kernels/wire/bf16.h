// BF16 on the wire: the upper half of a float (kernels/math/bf16.h), 2 bytes per value.
//
// wire + residual == S exactly, in both rounding modes: the difference of a float and its BF16 rounding is a
// float, except where it underflows.
//
// Wires may lie at any 2-byte address; 16-byte alignment is fast. The ops therefore also convert arrays
// between FP32 and BF16: a ReduceEncode without inputs and residual, 6 bytes per element.
#pragma once

#include "kernels/op.h"
#include "kernels/wire/format.h"

namespace gradwire {

GW_SIDES(bf16_reduce_encode, ReduceEncode)
inline void bf16_reduce_encode(const Stream& stream, const ReduceEncode& args) {
  detail::dispatch(stream, args, host::bf16_reduce_encode, GW_CUDA_SIDE(bf16_reduce_encode),
                   "bf16_reduce_encode");
}

GW_SIDES(bf16_decode, Decode)
inline void bf16_decode(const Stream& stream, const Decode& args) {
  detail::dispatch(stream, args, host::bf16_decode, GW_CUDA_SIDE(bf16_decode), "bf16_decode");
}

}  // namespace gradwire
