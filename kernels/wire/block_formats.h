// The block formats (kernels/wire/block.h). A new one takes its header and two lines here.
#pragma once

#include "kernels/op.h"
#include "kernels/wire/format.h"
#include "kernels/wire/int8.h"

// FORMAT(type, name in specs) of each, in the order of the docs.
// clang-format off
#define GW_BLOCK_FORMATS(FORMAT) \
  FORMAT(Int8, int8)
// clang-format on

namespace gradwire {

#define GW_DECLARE(F, NAME)                    \
  GW_SIDES(NAME##_reduce_encode, ReduceEncode) \
  GW_SIDES(NAME##_decode, Decode)
GW_BLOCK_FORMATS(GW_DECLARE)
#undef GW_DECLARE

}  // namespace gradwire
