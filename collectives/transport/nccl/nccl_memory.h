// Memory allocated by and registered with NCCL, so that other ranks can map it or network cards can reach it.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>

#include "collectives/transport/nccl/nccl_api.h"
#include "collectives/transport/nccl/nccl_communicator.h"
#include "runtime/device/device.h"

namespace gradwire {

class NcclMemory {
 public:
  // Allocates memory on the current device. Returns null if NCCL cannot allocate the memory.
  static std::shared_ptr<NcclMemory> allocate(const NcclApi& api, size_t bytes);
  // Deregisters the memory if it is registered and the communicator still exists, then frees it.
  ~NcclMemory();
  NcclMemory(const NcclMemory&) = delete;

  void* data() const { return data_; }
  // Records how to undo a registration with a communicator.
  void registered(WhileAlive alive, std::function<void()> deregister);

 private:
  NcclMemory(const NcclApi& api, void* data) : api_(api), data_(data) {}
  const NcclApi& api_;
  void* const data_;
  WhileAlive alive_;
  std::function<void()> deregister_;
};

// A pool of registered memory for exchanges.
class NcclMemoryPool {
 public:
  // Creates an empty pool. `comm` must outlive the pool. The memory may outlive `comm`.
  NcclMemoryPool(NcclCommunicator& comm, Device device, std::chrono::milliseconds timeout)
      : comm_(comm), device_(device), timeout_(timeout) {}

  // Returns registered memory, or an empty buffer if NCCL refuses. Small buffers share an allocation.
  Buffer allocate(size_t bytes);

 private:
  std::shared_ptr<NcclMemory> registered(size_t bytes);

  NcclCommunicator& comm_;
  const Device device_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;                  // guards the members below
  std::weak_ptr<NcclMemory> shared_;  // memory from which the next small buffer is taken
  size_t shared_used_ = 0;
};

}  // namespace gradwire
