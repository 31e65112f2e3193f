#include "kernels/wire/bf16.h"

namespace gradwire {
GW_DEFINE_OP(bf16_encode, Bf16Encode)
GW_DEFINE_OP(bf16_decode, Bf16Decode)
GW_DEFINE_OP(bf16_decode_add, Bf16DecodeAdd)
GW_DEFINE_OP(bf16_decode_add_encode, Bf16DecodeAddEncode)
}  // namespace gradwire
