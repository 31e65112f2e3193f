#include "kernels/wire/block_host.h"

#include "kernels/wire/block_formats.h"
#include "kernels/wire/fp8.h"

namespace gradwire::host {

GW_BLOCK_FORMAT_HOST(Fp8, fp8)
#define GW_DEFINE(F, NAME) GW_BLOCK_FORMAT_HOST(Packed<F>, NAME)
GW_BLOCK_FORMATS(GW_DEFINE)
#undef GW_DEFINE

}  // namespace gradwire::host
