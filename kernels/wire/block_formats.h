// The block formats (kernels/wire/block.h). A new format needs a header and two lines in this file.
#pragma once

#include "kernels/op.h"
#include "kernels/wire/block.h"
#include "kernels/wire/eden.h"
#include "kernels/wire/int.h"
#include "kernels/wire/microscaling.h"
#include "kernels/wire/qsgd.h"
#include "kernels/wire/topk.h"
#include "kernels/wire/varbits.h"

// FORMAT(type, name in specs) for each format, in the order of the docs.
// clang-format off
#define GW_BLOCK_FORMATS(FORMAT) \
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

// Declares each format's ops. The format with its options precedes the arguments.
#define GW_DECLARE(F, NAME)                                                         \
  namespace reference {                                                             \
  void NAME##_reduce_encode(const BlockCoder<F>& coder, const ReduceEncode& args);  \
  void NAME##_decode(const BlockCoder<F>& coder, const Decode& args);               \
  }                                                                                 \
  namespace host {                                                                  \
  void NAME##_reduce_encode(const BlockCoder<F>& coder, const ReduceEncode& args);  \
  void NAME##_decode(const BlockCoder<F>& coder, const Decode& args);               \
  }                                                                                 \
  namespace cuda {                                                                  \
  void NAME##_reduce_encode(CudaStream, const BlockCoder<F>&, const ReduceEncode&); \
  void NAME##_decode(CudaStream, const BlockCoder<F>&, const Decode&);              \
  }
GW_BLOCK_FORMATS(GW_DECLARE)
#undef GW_DECLARE

}  // namespace gradwire
