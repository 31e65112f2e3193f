#include "kernels/optimizer/optimizer.h"

namespace gradwire {
GW_DEFINE_OP(sgd_step, SgdStep)
GW_DEFINE_OP(adamw_step, AdamWStep)
}  // namespace gradwire
