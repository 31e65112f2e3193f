#include "kernels/wire/fp32.h"

namespace gradwire {
GW_DEFINE_OP(fp32_reduce, Fp32Reduce)
}  // namespace gradwire
