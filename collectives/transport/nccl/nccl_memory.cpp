#ifdef GRADWIRE_HAS_NCCL

#include "collectives/transport/nccl/nccl_memory.h"

namespace gradwire {

std::shared_ptr<NcclMemory> NcclMemory::allocate(const NcclApi& api, size_t bytes) {
  if (api.mem_alloc == nullptr || api.mem_free == nullptr) return nullptr;
  void* data = nullptr;
  if (api.mem_alloc(&data, bytes) != ncclSuccess || data == nullptr) return nullptr;
  return std::shared_ptr<NcclMemory>(new NcclMemory(api, data));
}

NcclMemory::~NcclMemory() {
  if (deregister_) alive_(deregister_);
  api_.mem_free(data_);
}

void NcclMemory::registered(WhileAlive alive, std::function<void()> deregister) {
  alive_ = std::move(alive);
  deregister_ = std::move(deregister);
}

}  // namespace gradwire

#endif  // GRADWIRE_HAS_NCCL
