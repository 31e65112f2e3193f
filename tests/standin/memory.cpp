// Device memory, page-locked memory, copies and fills.
//
// Each device has a range of addresses, reserved without access. Pages of live allocations become accessible
// when an operation that may access the device's memory runs, and inaccessible when no operation runs. So the
// host faults when it accesses device memory, except while an operation is running. Operations run only when
// the host waits, or a few milliseconds after being enqueued, so a host that does not wait also faults.
// Addresses are never reused, so an access after cudaFree also faults. New memory is filled with NaN (0xff
// bytes).
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/standin/machine.h"

namespace gradwire::standin {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kRange = size_t{1} << 40;  // bytes of address space per device

struct Allocation {
  size_t bytes = 0, mapped = 0;
  bool live = false;  // false: the stream has not reached the cudaMallocFromPoolAsync yet
};

struct Range {
  char* begin = nullptr;
  size_t next = 0;  // offset of the next allocation in bytes
  std::map<char*, Allocation> allocations;
};

Range ranges[kMaxDevices];
uint32_t opened = 0;
std::map<char*, size_t>& pinned = *new std::map<char*, size_t>();
char running_operation[256] = "";

void on_fault(int signal_number, siginfo_t* info, void*) {
  auto* const address = static_cast<char*>(info->si_addr);
  for (int d = 0; d < kMaxDevices; ++d) {
    if (ranges[d].begin == nullptr || address < ranges[d].begin || address >= ranges[d].begin + kRange)
      continue;
    char text[512];
    if (running_operation[0] == '\0') {
      std::snprintf(text, sizeof text,
                    "standin: the host touched memory of cuda:%d at %p; only kernels and copies may\n", d,
                    static_cast<void*>(address));
    } else {
      std::snprintf(
          text, sizeof text,
          "standin: while %s ran, %p was touched, an address of cuda:%d that is not allocated, or that the "
          "running device cannot reach: freed too early, never allocated, or no peer access\n",
          running_operation, static_cast<void*>(address), d);
    }
    if (write(STDERR_FILENO, text, std::strlen(text)) < 0) break;
    break;
  }
  signal(signal_number, SIG_DFL);  // the repeated access faults again and ends the process
}

void install_fault_handler() {
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
}

Range& range_of(int device) {
  Range& range = ranges[device];
  if (range.begin != nullptr) return range;
  static const bool installed = (install_fault_handler(), true);
  (void)installed;
  void* const begin = mmap(nullptr, kRange, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) {
    std::fprintf(stderr, "standin: cannot reserve addresses for the memory of cuda:%d\n", device);
    std::abort();
  }
  range.begin = static_cast<char*>(begin);
  return range;
}

void set_access(char* begin, size_t bytes, bool access) {
  if (mprotect(begin, bytes, access ? PROT_READ | PROT_WRITE : PROT_NONE) == 0) return;
  std::fprintf(stderr, "standin: mprotect of %zu bytes of device memory failed\n", bytes);
  std::abort();
}

bool is_open(int device) {
  return (opened >> device & 1u) != 0;
}

// Sets the access of a device's live allocations, with one system call per run of adjacent allocations.
void set_access_of_device(int device, bool access) {
  char* begin = nullptr;
  size_t bytes = 0;
  for (const auto& [data, allocation] : ranges[device].allocations) {
    if (!allocation.live) continue;
    if (data != begin + bytes) {
      if (bytes > 0) set_access(begin, bytes, access);
      begin = data, bytes = 0;
    }
    bytes += allocation.mapped;
  }
  if (bytes > 0) set_access(begin, bytes, access);
}

// Returns the allocation that contains an address, or null.
const std::pair<char* const, Allocation>* find_allocation(const void* pointer, int* device = nullptr) {
  auto* const address = const_cast<char*>(static_cast<const char*>(pointer));
  for (int d = 0; d < kMaxDevices; ++d) {
    if (ranges[d].begin == nullptr || address < ranges[d].begin || address >= ranges[d].begin + kRange)
      continue;
    if (device != nullptr) *device = d;
    auto after = ranges[d].allocations.upper_bound(address);
    if (after == ranges[d].allocations.begin()) return nullptr;
    --after;
    return address < after->first + after->second.bytes ? &*after : nullptr;
  }
  if (device != nullptr) *device = -1;
  return nullptr;
}

enum class Place { device, pinned, pageable };

// Finds the kind of memory of `bytes` bytes. Returns false if the bytes exceed an allocation or are
// unallocated device memory.
bool locate(const void* pointer, size_t bytes, Place& place, int& device) {
  const auto* const found = find_allocation(pointer, &device);
  const auto* const address = static_cast<const char*>(pointer);
  if (device >= 0) {
    place = Place::device;
    return found != nullptr && address + bytes <= found->first + found->second.bytes;
  }
  place = Place::pageable;
  auto after = pinned.upper_bound(const_cast<char*>(address));
  if (after == pinned.begin()) return true;
  --after;
  if (address >= after->first + after->second) return true;
  place = Place::pinned;
  return address + bytes <= after->first + after->second;
}

size_t in_pages(size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

// Reserves addresses. make_live() turns the addresses into memory.
char* reserve(int device, size_t bytes) {
  Device& d = machine().devices[device];
  if (in_pages(bytes) > kDeviceBytes - d.used_bytes) return nullptr;
  Range& range = range_of(device);
  if (range.next + in_pages(bytes) > kRange) return nullptr;
  char* const data = range.begin + range.next;
  range.next += in_pages(bytes);
  d.used_bytes += in_pages(bytes);
  range.allocations[data] = {bytes, in_pages(bytes)};
  return data;
}

void make_live(int device, char* data) {
  const size_t mapped = ranges[device].allocations.at(data).mapped;
  set_access(data, mapped, true);
  std::memset(data, 0xff, mapped);
  ranges[device].allocations[data].live = true;
  if (!is_open(device)) set_access(data, mapped, false);
}

void release(int device, char* data) {
  const auto at = ranges[device].allocations.find(data);
  const size_t mapped = at->second.mapped;
  ranges[device].allocations.erase(at);
  set_access(data, mapped, false);
  madvise(data, mapped, MADV_DONTNEED);
  machine().devices[device].used_bytes -= mapped;
}

}  // namespace

void open_memory(uint32_t devices) {
  for (int d = 0; d < kMaxDevices; ++d) {
    const bool access = (devices >> d & 1u) != 0;
    if (access != is_open(d)) set_access_of_device(d, access);
  }
  opened = devices;
}

void refuse_host_memory(const char* name, std::span<const void* const> pointers) {
  for (const void* pointer : pointers) {
    Place place{};
    int device = -1;
    if (pointer == nullptr || (locate(pointer, 0, place, device), place != Place::pageable)) continue;
    std::fprintf(stderr, "standin: %s got %p, an address of pageable host memory, which a GPU cannot reach\n",
                 name, pointer);
    std::abort();
  }
}

void name_running_operation(const char* name) {
  std::snprintf(running_operation, sizeof running_operation, "%s", name);
}

}  // namespace gradwire::standin

using namespace gradwire::standin;

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  GW_STANDIN_CALL(cudaMalloc);
  const Lock lock(machine().mutex);
  if (const cudaError_t status = forbid_while_capturing(); status != cudaSuccess) return failed(status);
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  char* const data = reserve(current_device(), bytes);
  if (data == nullptr) return failed(cudaErrorMemoryAllocation);
  make_live(current_device(), data);
  *pointer = data;
  return cudaSuccess;
}

// Frees device memory after all kernels of its device have ended, as on a GPU (docs/results/2026-11-26-gpu).
cudaError_t cudaFree(void* pointer) {
  GW_STANDIN_CALL(cudaFree);
  if (pointer == nullptr) return cudaSuccess;
  Lock lock(machine().mutex);
  if (const cudaError_t status = forbid_while_capturing(); status != cudaSuccess) return failed(status);
  int device = -1;
  const auto* const found = find_allocation(pointer, &device);
  if (found == nullptr || found->first != pointer) return failed(cudaErrorInvalidValue);
  wait_for_device(lock, device);
  release(device, static_cast<char*>(pointer));
  return cudaSuccess;
}

// Creates a pool, represented by its device's number. Freed memory is released immediately, and enabled peers
// can access all memory.
cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* properties) {
  GW_STANDIN_CALL(cudaMemPoolCreate);
  if (properties->location.type != cudaMemLocationTypeDevice ||
      properties->allocType != cudaMemAllocationTypePinned)
    return failed(cudaErrorInvalidValue);
  *pool = reinterpret_cast<cudaMemPool_t>(static_cast<uintptr_t>(properties->location.id) + 1);
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  GW_STANDIN_CALL(cudaMemPoolSetAttribute);
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
  GW_STANDIN_CALL(cudaMemPoolSetAccess);
  return cudaSuccess;
}
cudaError_t cudaMallocFromPoolAsync(void** pointer, size_t bytes, cudaMemPool_t pool, cudaStream_t handle) {
  GW_STANDIN_CALL(cudaMallocFromPoolAsync);
  const Lock lock(machine().mutex);
  CUstream_st* const stream = find_stream(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (stream->capture != nullptr) return failed(cudaErrorNotSupported);
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  const int device = stream->device;
  if (reinterpret_cast<uintptr_t>(pool) != static_cast<uintptr_t>(device) + 1)
    return failed(cudaErrorInvalidValue);
  char* const data = reserve(device, bytes);
  if (data == nullptr) return failed(cudaErrorMemoryAllocation);
  *pointer = data;
  return failed(enqueue(*stream, {.name = "cudaMallocFromPoolAsync", .run = [device, data] {
                                    const std::lock_guard running(machine().mutex);
                                    make_live(device, data);
                                  }}));
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t handle) {
  GW_STANDIN_CALL(cudaFreeAsync);
  if (pointer == nullptr) return cudaSuccess;
  const Lock lock(machine().mutex);
  CUstream_st* const stream = find_stream(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (stream->capture != nullptr) return failed(cudaErrorNotSupported);
  auto* const data = static_cast<char*>(pointer);
  return failed(enqueue(*stream, {.name = "cudaFreeAsync", .run = [data] {
                                    const std::lock_guard running(machine().mutex);
                                    int device = -1;
                                    const auto* const found = find_allocation(data, &device);
                                    if (found == nullptr || found->first != data) {
                                      std::fprintf(stderr,
                                                   "standin: cudaFreeAsync of %p, which is not allocated\n",
                                                   static_cast<void*>(data));
                                      std::abort();
                                    }
                                    release(device, data);
                                  }}));
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  GW_STANDIN_CALL(cudaPointerGetAttributes);
  const Lock lock(machine().mutex);
  int device = -1;
  *attributes = {};
  if (find_allocation(pointer, &device) == nullptr) return cudaSuccess;  // cudaMemoryTypeUnregistered
  attributes->type = cudaMemoryTypeDevice;
  attributes->device = device;
  attributes->devicePointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  GW_STANDIN_CALL(cudaMallocHost);
  const Lock lock(machine().mutex);
  if (const cudaError_t status = forbid_while_capturing(); status != cudaSuccess) return failed(status);
  *pointer = std::aligned_alloc(kPage, in_pages(std::max<size_t>(bytes, 1)));
  if (*pointer == nullptr) return failed(cudaErrorMemoryAllocation);
  std::memset(*pointer, 0xff, bytes);
  pinned[static_cast<char*>(*pointer)] = bytes;
  return cudaSuccess;
}
// Frees page-locked memory after all kernels have ended, as cudaFree does.
cudaError_t cudaFreeHost(void* pointer) {
  GW_STANDIN_CALL(cudaFreeHost);
  if (pointer == nullptr) return cudaSuccess;
  Lock lock(machine().mutex);
  if (const cudaError_t status = forbid_while_capturing(); status != cudaSuccess) return failed(status);
  const auto at = pinned.find(static_cast<char*>(pointer));
  if (at == pinned.end()) return failed(cudaErrorInvalidValue);
  for (size_t d = 0; d < machine().devices.size(); ++d) wait_for_device(lock, static_cast<int>(d));
  pinned.erase(static_cast<char*>(pointer));
  std::free(pointer);
  return cudaSuccess;
}

// Enqueues a copy. Pageable memory is read or written before the call returns.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t handle) {
  GW_STANDIN_CALL(cudaMemcpyAsync);
  Lock lock(machine().mutex);
  CUstream_st* const stream = find_stream(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (bytes == 0) return cudaSuccess;
  Place source{}, target{};
  int source_device = -1, target_device = -1;
  if (!locate(from, bytes, source, source_device) || !locate(to, bytes, target, target_device))
    return failed(cudaErrorInvalidValue);
  const bool to_device = target == Place::device, from_device = source == Place::device;
  if ((kind == cudaMemcpyHostToDevice && (!to_device || from_device)) ||
      (kind == cudaMemcpyDeviceToHost && (to_device || !from_device)) ||
      (kind == cudaMemcpyDeviceToDevice && !(to_device && from_device)))
    return failed(cudaErrorInvalidValue);
  Op op{.name = fmt::format("a copy of {} bytes", bytes)};
  if (to_device) op.devices |= 1u << target_device;
  if (from_device) op.devices |= 1u << source_device;
  const bool capturing = stream->capture != nullptr;
  if (source == Place::pageable && !capturing) {
    const auto* const begin = static_cast<const char*>(from);
    op.run = [to, bytes, staged = std::vector<char>(begin, begin + bytes)] {
      std::memcpy(to, staged.data(), bytes);
    };
  } else {
    op.run = [to, from, bytes] { std::memmove(to, from, bytes); };
  }
  const cudaError_t status = enqueue(*stream, std::move(op));
  if (status == cudaSuccess && target == Place::pageable && !capturing)
    wait_for(lock, enqueue_record(*stream));
  return failed(status);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t handle) {
  GW_STANDIN_CALL(cudaMemsetAsync);
  const Lock lock(machine().mutex);
  CUstream_st* const stream = find_stream(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (bytes == 0) return cudaSuccess;
  Place place{};
  int device = -1;
  if (!locate(to, bytes, place, device) || place == Place::pageable) return failed(cudaErrorInvalidValue);
  return failed(enqueue(*stream, {.name = fmt::format("a fill of {} bytes", bytes),
                                  .run = [to, value, bytes] { std::memset(to, value, bytes); },
                                  .devices = device >= 0 ? 1u << device : 0u}));
}

}  // extern "C"
