#include "kernels/powersgd/orthonormalize.h"

namespace gradwire {
GW_DEFINE_OP(orthonormalize, Orthonormalize)
}  // namespace gradwire
