// The block formats (kernels/wire/block.h). A new format needs a header and two lines in this file.
#pragma once

#include "kernels/wire/block.h"
#include "kernels/wire/eden.h"
#include "kernels/wire/fp8.h"
#include "kernels/wire/int.h"
#include "kernels/wire/microscaling.h"
#include "kernels/wire/qsgd.h"
#include "kernels/wire/topk.h"
#include "kernels/wire/varbits.h"

// FORMAT(type, name in specs) for each format, in the order of the docs.
// clang-format off
#define GW_BLOCK_FORMATS(FORMAT) \
  FORMAT(Fp8, fp8) \
  FORMAT(Int8, int8) \
  FORMAT(Int4, int4) \
  FORMAT(Int2, int2) \
  FORMAT(MxFp8, mxfp8) \
  FORMAT(MxFp6, mxfp6) \
  FORMAT(MxFp4, mxfp4) \
  FORMAT(NvFp4, nvfp4) \
  FORMAT(Natural, natural) \
  FORMAT(Qsgd, qsgd) \
  FORMAT(TernGrad, terngrad) \
  FORMAT(Sign, sign) \
  FORMAT(Eden, eden) \
  FORMAT(VarBits, varbits) \
  FORMAT(TopK, topk)
// clang-format on

namespace gradwire {

// The names of a format and of its ops.
struct FormatNames {
  const char *format, *reduce_encode, *decode;
};
template <typename F>
inline constexpr FormatNames kNames = {};
#define GW_DEFINE(F, NAME) \
  template <>              \
  inline constexpr FormatNames kNames<F> = {#NAME, #NAME "_reduce_encode", #NAME "_decode"};
GW_BLOCK_FORMATS(GW_DEFINE)
#undef GW_DEFINE

}  // namespace gradwire
