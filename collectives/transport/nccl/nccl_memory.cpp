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

// Allocates memory and registers it with the communicator. Not collective.
std::shared_ptr<NcclMemory> NcclMemoryPool::registered(size_t bytes) {
  const NcclApi& api = comm_.api();
  std::shared_ptr<NcclMemory> memory = NcclMemory::allocate(api, bytes);
  if (memory == nullptr) return nullptr;
  void* handle = nullptr;
  ncclComm_t registered_with = nullptr;
  const auto register_memory = [&](ncclComm_t comm, const NcclPatience&) {
    registered_with = comm;
    return api.comm_register(comm, memory->data(), bytes, &handle);
  };
  if (comm_.run(register_memory, {.turn = timeout_}) != ncclSuccess) return nullptr;
  memory->registered(comm_.while_alive(),
                     [&api, registered_with, handle] { api.comm_deregister(registered_with, handle); });
  return memory;
}

// Returns a view of registered memory. NCCL allocates at least 2 MiB, so small buffers, such as a bucket's
// factors of about 64 KiB, share an allocation.
Buffer NcclMemoryPool::allocate(size_t bytes) {
  constexpr size_t kShared = size_t{2} << 20;
  detail::make_current(device_);
  if (bytes > kShared / 2) {
    const std::shared_ptr<NcclMemory> memory = registered(bytes);
    return memory ? Buffer::view(device_, memory->data(), bytes, memory) : Buffer();
  }
  std::lock_guard lock(mutex_);
  std::shared_ptr<NcclMemory> memory = shared_.lock();
  if (memory == nullptr || shared_used_ + bytes > kShared) {
    memory = registered(kShared);
    if (memory == nullptr) return {};
    shared_ = memory;
    shared_used_ = 0;
  }
  char* const piece = static_cast<char*>(memory->data()) + shared_used_;
  shared_used_ += (bytes + 255) / 256 * 256;
  return Buffer::view(device_, piece, bytes, memory);
}

}  // namespace gradwire

#endif  // GRADWIRE_HAS_NCCL
