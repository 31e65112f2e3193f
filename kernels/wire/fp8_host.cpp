// The FP8 wire format on the host: the loops of the block formats.
#include "kernels/wire/fp8.h"

#include "kernels/wire/block_host.h"

namespace gradwire::host {

namespace {
GW_BLOCK_FORMAT_HOST(Fp8, fp8_blocks)
}  // namespace

void fp8_reduce_encode(const ReduceEncode& a) {
  fp8_blocks_reduce_encode({}, a);
}
void fp8_decode(const Decode& a) {
  fp8_blocks_decode({}, a);
}

}  // namespace gradwire::host
