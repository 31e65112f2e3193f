// Stands in until the kernels land.
#include "kernels/powersgd.h"

namespace gradwire::cuda {
void powersgd_project(CudaStream, const PowerSgdProject&) {
  throw DeviceError("powersgd_project: no CUDA kernel yet");
}
void powersgd_back_project(CudaStream, const PowerSgdBackProject&) {
  throw DeviceError("powersgd_back_project: no CUDA kernel yet");
}
void powersgd_reconstruct(CudaStream, const PowerSgdReconstruct&) {
  throw DeviceError("powersgd_reconstruct: no CUDA kernel yet");
}
}  // namespace gradwire::cuda
