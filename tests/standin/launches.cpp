// Launches of kernels: limits, function attributes, and enqueueing on a stream.
#include <fmt/format.h>

#include "runtime/device/device_cuda.h"
#include "tests/standin/launch.h"
#include "tests/standin/machine.h"

namespace gradwire::standin {
namespace {

// Returns cudaSuccess, or the error with which a GPU would refuse the launch. The caller holds the mutex.
cudaError_t check_limits(const KernelCall& call, const CUstream_st& stream) {
  if (stream.device != current_device()) return cudaErrorInvalidResourceHandle;
  const size_t threads = size_t{call.block[0]} * call.block[1] * call.block[2];
  if (threads == 0 || threads > 1024 || call.block[2] > 64) return cudaErrorInvalidConfiguration;
  if (call.grid[0] > 0x7fffffffu || call.grid[1] > 65535 || call.grid[2] > 65535)
    return cudaErrorInvalidConfiguration;
  if (call.shared_bytes > kSharedWithoutAsking) {
    const auto at = machine().allowed_shared.find({stream.device, call.kernel});
    if (at == machine().allowed_shared.end() || at->second < call.shared_bytes) return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

cudaError_t try_launch(KernelCall& call) {
  if (const cudaError_t planted = begin_call(call.name); planted != cudaSuccess) return planted;
  Lock lock(machine().mutex);
  CUstream_st* const stream = find_stream(call.stream);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t refused = check_limits(call, *stream); refused != cudaSuccess) return refused;
  if (stream->capture == nullptr) wait_until_launches_may_begin(lock, stream->device);
  return enqueue(*stream, {.name = fmt::format("kernel '{}'", call.name), .run = std::move(call.run)});
}

}  // namespace

void launch(KernelCall call) {
  failed(try_launch(call));
  cuda::check(cudaGetLastError(), call.name);
}

int enqueue_library_call(const char* name, CUstream_st* handle, std::span<const void* const> pointers,
                         std::function<void()> run) {
  if (const cudaError_t planted = begin_call(name); planted != cudaSuccess) return planted;
  Lock lock(machine().mutex);
  CUstream_st* const stream = find_stream(handle);
  if (stream == nullptr || stream->device != current_device()) return cudaErrorInvalidResourceHandle;
  refuse_host_memory(name, pointers);
  if (stream->capture == nullptr) wait_until_launches_may_begin(lock, stream->device);
  return enqueue(*stream, {.name = name, .run = std::move(run)});
}

}  // namespace gradwire::standin

using namespace gradwire::standin;

extern "C" {

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  GW_STANDIN_CALL(cudaFuncSetAttribute);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      static_cast<size_t>(value) > kMaxSharedBytes)
    return failed(cudaErrorInvalidValue);
  const Lock lock(machine().mutex);
  machine().allowed_shared[{current_device(), kernel}] = static_cast<size_t>(value);
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  GW_STANDIN_CALL(cudaFuncGetAttributes);
  *attributes = {};
  attributes->ptxVersion = attributes->binaryVersion = 80;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads,
                                                          size_t shared_bytes) {
  GW_STANDIN_CALL(cudaOccupancyMaxActiveBlocksPerMultiprocessor);
  if (threads < 1 || threads > 1024) return failed(cudaErrorInvalidValue);
  constexpr size_t kThreads = 2048;
  size_t fit = kThreads / static_cast<size_t>(threads);
  if (shared_bytes > 0) fit = std::min(fit, (kMaxSharedBytes + 1024) / shared_bytes);
  *blocks = static_cast<int>(fit);
  return cudaSuccess;
}

}  // extern "C"
