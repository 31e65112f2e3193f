// Memory allocated by and registered with NCCL, so that other ranks can map it or network cards can reach it.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "collectives/transport/nccl/nccl_api.h"

namespace gradwire {

// Runs the given function if the communicator still exists.
using WhileAlive = std::function<void(const std::function<void()>&)>;

class NcclMemory {
 public:
  // Allocates on the current device. Returns null if NCCL cannot.
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

}  // namespace gradwire
