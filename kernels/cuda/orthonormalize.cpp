// Stands in until the kernels land.
#include "kernels/orthonormalize.h"

namespace gradwire::cuda {
void orthonormalize(CudaStream, const Orthonormalize&) {
  throw DeviceError("orthonormalize: no CUDA kernel yet");
}
}  // namespace gradwire::cuda
