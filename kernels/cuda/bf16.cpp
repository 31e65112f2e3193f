// Stands in until the kernels land.
#include "kernels/bf16.h"
#include "kernels/fp32.h"

namespace gradwire::cuda {
void bf16_encode(CudaStream, const Bf16Encode&) {
  throw DeviceError("bf16_encode: no CUDA kernel yet");
}
void bf16_decode(CudaStream, const Bf16Decode&) {
  throw DeviceError("bf16_decode: no CUDA kernel yet");
}
void bf16_decode_add(CudaStream, const Bf16DecodeAdd&) {
  throw DeviceError("bf16_decode_add: no CUDA kernel yet");
}
void bf16_decode_add_encode(CudaStream, const Bf16DecodeAddEncode&) {
  throw DeviceError("bf16_decode_add_encode: no CUDA kernel yet");
}
void fp32_reduce(CudaStream, const Fp32Reduce&) {
  throw DeviceError("fp32_reduce: no CUDA kernel yet");
}
}  // namespace gradwire::cuda
