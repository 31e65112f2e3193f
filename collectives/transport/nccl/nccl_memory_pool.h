// Memory for exchanges that is registered with an NCCL communicator.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

#include "collectives/transport/nccl/nccl_communicator.h"
#include "collectives/transport/nccl/nccl_memory.h"
#include "runtime/device/device.h"

namespace gradwire {

class NcclMemoryPool {
 public:
  // `comm` must outlive the object, but not the memory.
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
  std::weak_ptr<NcclMemory> shared_;  // source of the next small buffer
  size_t shared_used_ = 0;
};

}  // namespace gradwire
