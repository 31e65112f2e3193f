// Memory that NCCL allocates and is told of, so that it can be mapped by other ranks or reached by network cards.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "collectives/transport/nccl_api.h"

namespace gradwire {

// Calls what it is given if the communicator is still there.
using WhileAlive = std::function<void(const std::function<void()>&)>;

class NcclMemory {
 public:
  // On the current device; null if NCCL has none.
  static std::shared_ptr<NcclMemory> allocate(const NcclApi& api, size_t bytes);
  // Deregisters it, if it is registered and the communicator lives, and then frees it.
  ~NcclMemory();
  NcclMemory(const NcclMemory&) = delete;

  void* data() const { return data_; }
  // It has been registered with a communicator: how to undo that.
  void registered(WhileAlive alive, std::function<void()> deregister);

 private:
  NcclMemory(const NcclApi& api, void* data) : api_(api), data_(data) {}
  const NcclApi& api_;
  void* const data_;
  WhileAlive alive_;
  std::function<void()> deregister_;
};

}  // namespace gradwire
