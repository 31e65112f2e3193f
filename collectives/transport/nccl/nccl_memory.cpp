#ifdef GRADWIRE_HAS_NCCL

#include "collectives/transport/nccl/nccl_memory.h"

#include "collectives/transport/nccl/nccl_transport.h"

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

// --- NcclTransport ---

WhileAlive NcclTransport::while_alive() const {
  return [use = use_](const std::function<void()>& call) {
    const Turn turn(use, std::chrono::milliseconds(1000));
    if (turn.entered) call();
  };
}

std::shared_ptr<NcclMemory> NcclTransport::registered_memory(size_t bytes) {
  std::shared_ptr<NcclMemory> memory = NcclMemory::allocate(api_, bytes);
  if (memory == nullptr) return nullptr;
  const Turn turn(use_, setup_.timeout);
  void* handle = nullptr;
  const ncclComm_t comm = comm_;
  if (!turn.entered || api_.comm_register(comm, memory->data(), bytes, &handle) != ncclSuccess)
    return nullptr;
  memory->registered(while_alive(), [&api = api_, comm, handle] { api.comm_deregister(comm, handle); });
  return memory;
}

// Registration is local to this rank. Falls back to ordinary memory if NCCL refuses. NCCL allocates at least
// 2 MiB, so small buffers, such as a bucket's factors of about 64 KiB, share an allocation.
Buffer NcclTransport::exchange_memory(size_t bytes) {
  const bool can = setup_.owned && watched_ && world() > 1 && bytes > 0 && api_.comm_register != nullptr &&
                   api_.comm_deregister != nullptr;
  if (!can) return Transport::exchange_memory(bytes);
  detail::make_current(setup_.device);
  constexpr size_t kShared = size_t{2} << 20;
  if (bytes > kShared / 2) {
    const std::shared_ptr<NcclMemory> memory = registered_memory(bytes);
    return memory ? Buffer::view(setup_.device, memory->data(), bytes, memory)
                  : Transport::exchange_memory(bytes);
  }
  std::lock_guard lock(shared_mutex_);
  std::shared_ptr<NcclMemory> memory = shared_.lock();
  if (memory == nullptr || shared_used_ + bytes > kShared) {
    memory = registered_memory(kShared);
    if (memory == nullptr) return Transport::exchange_memory(bytes);
    shared_ = memory;
    shared_used_ = 0;
  }
  char* const piece = static_cast<char*>(memory->data()) + shared_used_;
  shared_used_ += (bytes + 255) / 256 * 256;
  return Buffer::view(setup_.device, piece, bytes, memory);
}

}  // namespace gradwire

#endif  // GRADWIRE_HAS_NCCL
