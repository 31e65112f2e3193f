#ifdef GRADWIRE_HAS_NCCL

#include "collectives/transport/nccl/nccl_peers.h"

#include <fmt/format.h>

#include <utility>

#include "collectives/transport/nccl/nccl_memory.h"
#include "collectives/transport/nccl/nccl_transport.h"
#include "runtime/device/properties.h"
#include "runtime/util/error.h"

// The version whose structures this file reads; other versions may differ.
#if NCCL_VERSION_CODE == NCCL_VERSION(2, 28, 9)
#define GW_NCCL_DEVICE_API 1
#include <nccl_device/impl/comm__types.h>
#include <nccl_device/impl/core__types.h>
#endif

namespace gradwire {
namespace {

// nccl_peer_memory_obstacle() returns the obstacle to mapping memory in groups of `group` consecutive ranks;
// "" if there is no obstacle. map_nccl_peers() maps `memory`, of peer_window_bytes(half_bytes) bytes, among
// the ranks of this rank's group; it returns null if NCCL refuses. Both functions are collective.
#ifdef GW_NCCL_DEVICE_API
std::string nccl_peer_memory_obstacle(const NcclApi& api, ncclComm_t comm, int rank, int world, int group) {
  int version = 0;
  api.get_version(&version);
  if (version != NCCL_VERSION_CODE) {
    return fmt::format("NCCL {} is loaded, and peer memory needs exactly 2.28.9", api.version());
  }
  if (api.mem_alloc == nullptr || api.mem_free == nullptr || api.window_register == nullptr ||
      api.window_deregister == nullptr || api.team_lsa == nullptr) {
    return "this NCCL lacks its device API";
  }
  if (group > kMostPeers) return fmt::format("{} ranks; at most {} can", group, kMostPeers);
  // Ask the communicator instead of a device communicator: between nodes ncclDevCommCreate() needs a network
  // that GPUs can drive.
  const auto [reachable, place, stride] = api.team_lsa(comm);
  if (reachable == 0) return "NCCL cannot map the ranks' memory";
  if (group == world && reachable < world) {
    return fmt::format(
        "ranks reach {} of {} by loads and stores; the others are on other machines, or the GPUs cannot "
        "access each other's memory",
        reachable, world);
  }
  if (reachable < group || reachable % group != 0 || place % group != rank % group) {
    return fmt::format("ranks reach {} by loads and stores, which are not nodes of {}", reachable, group);
  }
  return "";
}

std::shared_ptr<MappedPeers> map_nccl_peers(const NcclApi& api, ncclComm_t comm, Device device, int rank,
                                            int group, int64_t half_bytes, std::chrono::nanoseconds patience,
                                            WhileAlive alive, std::shared_ptr<NcclMemory> memory) {
  const auto bytes = static_cast<size_t>(peer_window_bytes(half_bytes));
  const Stream stream = device.is_host() ? Stream::immediate_host() : Stream::create(device, "set-up");
  fill_zero(stream, memory->data(), bytes);
  stream.synchronize();  // before other ranks access it: registering waits for all ranks
  ncclWindow_t window = nullptr;
  const ncclResult_t result =
      api.window_register(comm, memory->data(), bytes, &window, NCCL_WIN_COLL_SYMMETRIC);
  if (result != ncclSuccess || window == nullptr) return nullptr;
  memory->registered(std::move(alive), [&api, comm, window] { api.window_deregister(comm, window); });
  // If NCCL lacks symmetric memory, the window is a description on the host.
  if (device.is_cuda() && !is_cuda_memory(window)) return nullptr;
  ncclWindow_vidmem where{};
  copy(stream, &where, window, sizeof where);
  stream.synchronize();
  const int mine = rank % group;
  if (where.worldRank != rank || where.lsaRank % group != mine || where.stride4G == 0) {
    throw CommError(fmt::format(
        "rank {}: NCCL {} describes a window of another layout; use NCCL 2.28.9, or drop transport=peer",
        rank, api.version()));
  }

  auto made = std::make_shared<MappedPeers>(device, mine, group, half_bytes, patience);
  PeerMemory& m = made->memory;
  for (int r = 0; r < group; ++r) {
    const auto distance = static_cast<int64_t>(where.stride4G) * (where.lsaRank - mine + r) << 32;
    m.windows[r] = reinterpret_cast<std::byte*>(where.lsaFlatBase) + distance;
  }
  made->first_rank = rank - mine;
  if (device.is_cuda()) m.blocks = peer_blocks(multiprocessors(device), 1);  // equal on GPUs of one kind
  made->keep = std::move(memory);
  return made;
}

#else

std::string nccl_peer_memory_obstacle(const NcclApi&, ncclComm_t, int, int, int) {
  return fmt::format(
      "this build has the header of NCCL {}.{}.{}, and peer memory needs exactly that of 2.28.9", NCCL_MAJOR,
      NCCL_MINOR, NCCL_PATCH);
}

std::shared_ptr<MappedPeers> map_nccl_peers(const NcclApi&, ncclComm_t, Device, int, int, int64_t,
                                            std::chrono::nanoseconds, WhileAlive,
                                            std::shared_ptr<NcclMemory>) {
  return nullptr;
}

#endif

}  // namespace

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
  // A communicator that belongs to the program is used only for exchanges.
  if (!comm_.owned() || !watch_.watches()) return "the communicator is the program's own";
  transport_.begin_set_up("asking for peer memory (transport=peer, which must be in every rank's spec)");
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
  transport_.begin_set_up(fmt::format("{} (transport=peer, which must be in every rank's spec)", kDoing));
  detail::make_current(device);
  std::shared_ptr<NcclMemory> memory =
      NcclMemory::allocate(comm_.api(), static_cast<size_t>(peer_window_bytes(half_bytes)));
  // Registering waits for all ranks, even if one rank has no memory to register, so the ranks agree first.
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
