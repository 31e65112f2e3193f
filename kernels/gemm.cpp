#include "kernels/gemm.h"

namespace gradwire {
GW_DEFINE_OP(gemm, Gemm)
}  // namespace gradwire
