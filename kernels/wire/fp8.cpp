#include "kernels/wire/fp8.h"

namespace gradwire {
GW_DEFINE_OP(fp8_encode, Fp8Encode)
GW_DEFINE_OP(fp8_decode, Fp8Decode)
GW_DEFINE_OP(fp8_decode_add, Fp8DecodeAdd)
GW_DEFINE_OP(fp8_decode_add_encode, Fp8DecodeAddEncode)
}  // namespace gradwire
