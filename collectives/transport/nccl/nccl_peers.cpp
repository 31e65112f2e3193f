#ifdef GRADWIRE_HAS_NCCL

#include "collectives/transport/nccl/nccl_peers.h"

#include <fmt/format.h>

#include <utility>

#include "collectives/transport/nccl/nccl_memory.h"
#include "collectives/transport/nccl/nccl_peer_memory.h"
#include "collectives/transport/nccl/nccl_transport.h"
#include "runtime/util/error.h"

namespace gradwire {

// Calls NCCL on another thread, with an exchange's deadline. Returns ncclInProgress if the call did not
// return or the communicator is closed.
ncclResult_t NcclPeers::ask(std::function<void(ncclComm_t)> question) {
  return comm_.run_apart(
      [question = std::move(question)](ncclComm_t comm, const NcclPatience&) {
        question(comm);
        return ncclSuccess;
      },
      {.turn = watch_.timeout(), .deadline = SteadyClock::now() + watch_.timeout(), .stop = [this] {
         return watch_.failing();
       }});
}

std::string NcclPeers::obstacle(int group) {
  if (const auto known = obstacles_.find(group); known != obstacles_.end()) return known->second;
  // A communicator that belongs to the program is used for exchanges only.
  if (!comm_.owned() || !watch_.watches()) return "the communicator is the program's own";
  transport_.begin_set_up("asking for peer memory (transport=lsa, which must be in every rank's spec)");
  const auto answer = std::make_shared<std::string>();
  const int rank = comm_.rank(), world = comm_.world();
  const auto question = [answer, &api = comm_.api(), rank, world,
                         ranks = group > 0 ? group : world](ncclComm_t comm) {
    *answer = nccl_peer_memory_obstacle(api, comm, rank, world, ranks);
  };
  if (ask(question) == ncclInProgress) {
    throw CommError(fmt::format("rank {}: asking NCCL for peer memory: no answer for {} ms", rank,
                                watch_.timeout().count()));
  }
  return obstacles_[group] = *answer;
}

std::shared_ptr<MappedPeers> NcclPeers::map_peers(int64_t half_bytes, int group) {
  constexpr const char* kDoing = "mapping peer memory";
  constexpr const char* kAgreeing = "agreeing on peer memory";
  const Device device = transport_.device();
  transport_.begin_set_up(fmt::format("{} (transport=lsa, which must be in every rank's spec)", kDoing));
  detail::make_current(device);
  std::shared_ptr<NcclMemory> memory =
      NcclMemory::allocate(comm_.api(), static_cast<size_t>(peer_window_bytes(half_bytes)));
  // Registering waits for all ranks, even if one has no memory to register, so agree first.
  if (!transport_.agree(memory != nullptr, kAgreeing)) return nullptr;
  struct Made {
    std::shared_ptr<MappedPeers> peers;
    std::string error;
  };
  const auto made = std::make_shared<Made>();
  const auto question = [made, alive = comm_.while_alive(), &api = comm_.api(), device, rank = comm_.rank(),
                         ranks = group > 0 ? group : comm_.world(), half_bytes, patience = watch_.timeout(),
                         memory = std::move(memory)](ncclComm_t comm) {
    try {
      made->peers = map_nccl_peers(api, comm, device, rank, ranks, half_bytes, patience, alive, memory);
    } catch (const std::exception& error) {
      made->error = error.what();
    }
  };
  if (ask(question) == ncclInProgress) {
    watch_.give_up(kDoing, fmt::format("no progress for {} ms", watch_.timeout().count()));
  }
  if (!made->error.empty()) watch_.give_up(kDoing, made->error);
  if (!transport_.agree(made->peers != nullptr, kAgreeing)) return nullptr;
  watch_.watch_kernels(made->peers);
  return made->peers;
}

void NcclPeers::run_kernel(const Stream& stream, MappedPeers& peers, uint64_t bytes, const std::string& what,
                           const std::function<void(const Stream&)>& work) {
  transport_.enqueue_watched(stream, what, peers.first_rank, peers.memory.world, bytes, work);
}

}  // namespace gradwire

#endif  // GRADWIRE_HAS_NCCL
