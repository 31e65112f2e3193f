// store() and increment(): host scalars and step counters in device memory, in stream order.
#include "runtime/device/launch.cuh"

namespace gradwire::cuda {
namespace {

struct Payload {
  unsigned char bytes[64];
};

__global__ void store_kernel(unsigned char* dst, const __grid_constant__ Payload payload, int bytes) {
  wait_for_earlier_kernels();
  int i = static_cast<int>(threadIdx.x);
  if (i < bytes) dst[i] = payload.bytes[i];
}

__global__ void increment_kernel(uint64_t* counter) {
  wait_for_earlier_kernels();
  ++*counter;
}

}  // namespace

void store(CudaStream stream, void* dst, const void* value, size_t bytes) {
  Payload payload{};
  for (size_t i = 0; i < bytes; ++i) payload.bytes[i] = static_cast<const unsigned char*>(value)[i];
  launch("store", store_kernel, {.grid = dim3(1), .block = dim3(64), .stream = stream},
         static_cast<unsigned char*>(dst), payload, static_cast<int>(bytes));
}

void increment(CudaStream stream, uint64_t* counter) {
  launch("increment", increment_kernel, {.grid = dim3(1), .block = dim3(1), .stream = stream}, counter);
}

}  // namespace gradwire::cuda
