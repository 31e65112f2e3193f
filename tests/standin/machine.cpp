// Devices: their number, the current device of a thread, properties, and peer access.
#include "tests/standin/machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/standin/launch.h"

namespace gradwire::standin {
namespace {

thread_local int device_of_thread = 0;

bool exists(int device) {
  return device >= 0 && static_cast<size_t>(device) < machine().devices.size();
}

}  // namespace

uint64_t number_from_environment(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  char* end = nullptr;
  const uint64_t value = std::strtoull(text, &end, 10);
  if (*end == '\0') return value;
  std::fprintf(stderr, "standin: %s must be a number, not '%s'\n", name, text);
  std::_Exit(2);
}

Machine& machine() {
  static Machine& only = []() -> Machine& {
    auto* const made = new Machine();
    const uint64_t devices = number_from_environment("GRADWIRE_STANDIN_GPUS", 2);
    if (devices > kMaxDevices) {
      std::fprintf(stderr, "standin: GRADWIRE_STANDIN_GPUS must be 0 to %d, not %llu\n", kMaxDevices,
                   static_cast<unsigned long long>(devices));
      std::_Exit(2);
    }
    made->devices.resize(devices);
    for (size_t d = 0; d < devices; ++d) {
      made->devices[d].default_stream = std::make_unique<CUstream_st>();
      made->devices[d].default_stream->device = static_cast<int>(d);
    }
    const uint64_t connections = number_from_environment("CUDA_DEVICE_MAX_CONNECTIONS", 8);
    if (connections < 1 || connections > kMaxConnections) {
      std::fprintf(stderr, "standin: CUDA_DEVICE_MAX_CONNECTIONS must be 1 to %d, not %llu\n",
                   kMaxConnections, static_cast<unsigned long long>(connections));
      std::_Exit(2);
    }
    made->connections = static_cast<int>(connections);
    made->random.seed(number_from_environment("GRADWIRE_TEST_SEED", 1));
    return *made;
  }();
  return only;
}

int current_device() {
  return device_of_thread;
}

uint32_t reachable_from(int device) {
  return machine().devices[device].peers | 1u << device;
}

CUstream_st* find_stream(cudaStream_t handle) {
  if (handle == nullptr) return machine().devices[current_device()].default_stream.get();
  for (const auto& stream : machine().streams) {
    if (stream.get() == handle && !stream->destroyed) return handle;
  }
  return nullptr;
}

uint64_t draw() {
  const std::lock_guard lock(machine().mutex);
  return machine().random();
}

}  // namespace gradwire::standin

using namespace gradwire::standin;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = static_cast<int>(machine().devices.size());
  if (*count == 0) return failed(cudaErrorNoDevice);
  GW_STANDIN_CALL(cudaGetDeviceCount);
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  GW_STANDIN_CALL(cudaGetDevice);
  *device = device_of_thread;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  GW_STANDIN_CALL(cudaSetDevice);
  if (!exists(device)) return failed(cudaErrorInvalidDevice);
  device_of_thread = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() {
  GW_STANDIN_CALL(cudaProfilerStart);
  return cudaSuccess;
}
cudaError_t cudaProfilerStop() {
  GW_STANDIN_CALL(cudaProfilerStop);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  GW_STANDIN_CALL(cudaDeviceGetAttribute);
  if (!exists(device)) return failed(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 1;  // one multiprocessor, so that grid-stride loops iterate
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(kMaxSharedBytes);
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 8;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMemoryPoolsSupported:
      *value = 1;
      return cudaSuccess;
    default:
      std::fprintf(stderr, "standin: cudaDeviceGetAttribute: add attribute %d to tests/standin/machine.cpp\n",
                   static_cast<int>(attribute));
      return failed(cudaErrorNotSupported);
  }
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  GW_STANDIN_CALL(cudaGetDeviceProperties);
  if (!exists(device)) return failed(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "pretended GPU");
  properties->totalGlobalMem = kDeviceBytes;
  properties->sharedMemPerBlock = kSharedWithoutAsking;
  properties->sharedMemPerBlockOptin = kMaxSharedBytes;
  properties->warpSize = kWarp;
  properties->maxThreadsPerBlock = 1024;
  properties->major = 8;
  properties->multiProcessorCount = 1;
  properties->l2CacheSize = 1 << 20;
  properties->memoryBusWidth = 1024;
  properties->pciBusID = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int bytes, int device) {
  GW_STANDIN_CALL(cudaDeviceGetPCIBusId);
  if (!exists(device)) return failed(cudaErrorInvalidDevice);
  std::snprintf(id, static_cast<size_t>(bytes), "ffff:%02x:00.0",
                device);  // a PCI address that differs from those of this machine's devices
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  GW_STANDIN_CALL(cudaMemGetInfo);
  const Lock lock(machine().mutex);
  *total = kDeviceBytes;
  *free = kDeviceBytes - machine().devices[current_device()].used_bytes;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  GW_STANDIN_CALL(cudaDeviceCanAccessPeer);
  if (!exists(device) || !exists(peer)) return failed(cudaErrorInvalidDevice);
  *can = device != peer ? 1 : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  GW_STANDIN_CALL(cudaDeviceEnablePeerAccess);
  if (!exists(peer) || peer == device_of_thread) return failed(cudaErrorInvalidDevice);
  if (flags != 0) return failed(cudaErrorInvalidValue);
  const Lock lock(machine().mutex);
  uint32_t& peers = machine().devices[device_of_thread].peers;
  if ((peers >> peer & 1u) != 0) return failed(cudaErrorPeerAccessAlreadyEnabled);
  peers |= 1u << peer;
  return cudaSuccess;
}

// Finds no driver function.
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (result != nullptr) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
