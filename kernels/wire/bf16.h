// BF16 on the wire: the upper half of a float (kernels/math/small_float.h), 2 bytes per value.
//
// wire + residual == S exactly, in both rounding modes: the difference of a float and its BF16 rounding is a
// float, except where it underflows.
//
// Encoded arrays may start at any 2-byte address; 16-byte alignment is fast. The ops therefore also convert
// arrays between FP32 and BF16: a ReduceEncode without inputs and residual, which moves 6 bytes per element.
#pragma once

#include "kernels/op.h"
#include "kernels/wire/format.h"

namespace gradwire {

GW_OP(bf16_reduce_encode, ReduceEncode)

GW_OP(bf16_decode, Decode)

}  // namespace gradwire
