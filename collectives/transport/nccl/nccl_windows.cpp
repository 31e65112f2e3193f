#ifdef GRADWIRE_HAS_NCCL

#include "collectives/transport/nccl/nccl_windows.h"

#include <fmt/format.h>

#include <algorithm>

#include "collectives/transport/nccl/nccl_transport.h"
#include "collectives/transport/run_with_deadline.h"
#include "runtime/device/properties.h"
#include "runtime/util/error.h"
#include "runtime/util/mix.h"

// Supported only with the version whose structures are read here; other versions may differ.
#if NCCL_VERSION_CODE == NCCL_VERSION(2, 28, 9)
#define GW_NCCL_WINDOWS 1
#include <nccl_device/impl/comm__types.h>
#include <nccl_device/impl/core__types.h>
#endif

namespace gradwire {

#ifdef GW_NCCL_WINDOWS
std::string nccl_windows_obstacle(const NcclApi& api, ncclComm_t comm, int rank, int world, int group) {
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
  // Asks the communicator, not a device communicator: between nodes ncclDevCommCreate() needs a network that
  // GPUs can drive.
  const auto [reachable, place, stride] = api.team_lsa(comm);
  if (reachable == 0) return "NCCL cannot map the ranks' memory";
  if (group == world && reachable < world) {
    return fmt::format(
        "ranks reach {} of {} by loads and stores; the others are on other machines, or the GPUs cannot "
        "access "
        "each other's memory",
        reachable, world);
  }
  if (reachable < group || reachable % group != 0 || place % group != rank % group) {
    return fmt::format("ranks reach {} by loads and stores, which are not nodes of {}", reachable, group);
  }
  return "";
}

std::shared_ptr<MappedPeers> make_nccl_windows(const NcclApi& api, ncclComm_t comm, Device device, int rank,
                                               int group, int64_t half_bytes,
                                               std::chrono::nanoseconds patience, WhileAlive alive,
                                               std::shared_ptr<NcclMemory> memory) {
  const auto bytes = static_cast<size_t>(peer_window_bytes(half_bytes));
  const Stream stream = device.is_host() ? Stream::immediate_host() : Stream::create(device, "set-up");
  fill_zero(stream, memory->data(), bytes);
  stream.synchronize();  // before other ranks see it: registering waits for all ranks
  ncclWindow_t window = nullptr;
  const ncclResult_t result =
      api.window_register(comm, memory->data(), bytes, &window, NCCL_WIN_COLL_SYMMETRIC);
  if (result != ncclSuccess || window == nullptr) return nullptr;
  memory->registered(std::move(alive), [&api, comm, window] { api.window_deregister(comm, window); });
  // Without symmetric memory, NCCL's window is a description on the host.
  if (device.is_cuda() && !is_cuda_memory(window)) return nullptr;
  ncclWindow_vidmem where{};
  copy(stream, &where, window, sizeof where);
  stream.synchronize();
  const int mine = rank % group;
  if (where.worldRank != rank || where.lsaRank % group != mine || where.stride4G == 0) {
    throw CommError(
        fmt::format("rank {}: NCCL {} describes a window of another layout", rank, api.version()));
  }

  auto made = std::make_shared<MappedPeers>(device, mine, group, half_bytes, patience);
  PeerMemory& m = made->memory;
  for (int r = 0; r < group; ++r) {
    const auto distance = static_cast<int64_t>(where.stride4G) * (where.lsaRank - mine + r) << 32;
    m.windows[r] = reinterpret_cast<std::byte*>(where.lsaFlatBase) + distance;
  }
  made->first_rank = rank - mine;
  if (device.is_cuda()) m.blocks = peer_blocks(multiprocessors(device), 1);  // the same on GPUs of one kind
  made->keep = std::move(memory);
  return made;
}

#else

std::string nccl_windows_obstacle(const NcclApi&, ncclComm_t, int, int, int) {
  return fmt::format(
      "this build has the header of NCCL {}.{}.{}, and peer memory needs exactly that of 2.28.9", NCCL_MAJOR,
      NCCL_MINOR, NCCL_PATCH);
}

std::shared_ptr<MappedPeers> make_nccl_windows(const NcclApi&, ncclComm_t, Device, int, int, int64_t,
                                               std::chrono::nanoseconds, WhileAlive,
                                               std::shared_ptr<NcclMemory>) {
  return nullptr;
}

#endif

// --- NcclTransport ---

bool NcclTransport::ask_nccl(std::function<void(ncclComm_t)> call) const {
  const auto turn = std::make_shared<Turn>(use_, setup_.timeout);
  if (!turn->entered) return false;
  auto ask = [turn, call = std::move(call), gpu = setup_.gpu, comm = comm_.load()] {
    gpu->enter_thread();
    call(comm);
  };
  return run_with_deadline(std::move(ask), SteadyClock::now() + setup_.timeout, [this] {
    std::lock_guard lock(mutex_);
    return cause_.has_value() || !failure_.empty();
  });
}

std::string NcclTransport::obstacle(int group) {
  if (const auto known = peer_obstacles_.find(group); known != peer_obstacles_.end()) return known->second;
  // A program's own communicator is used for exchanges only.
  if (!setup_.owned || !watched_) return "the communicator is the program's own";
  begin_set_up("asking for peer memory (transport=lsa, which must be in every rank's spec)");
  const auto answer = std::make_shared<std::string>();
  const bool asked =
      ask_nccl([answer, &api = api_, rank = rank(), world = world(), ranks = group > 0 ? group : world()](
                   ncclComm_t comm) { *answer = nccl_windows_obstacle(api, comm, rank, world, ranks); });
  if (!asked)
    throw CommError(fmt::format("rank {}: asking NCCL for peer memory: no answer for {} ms", rank(),
                                setup_.timeout.count()));
  return peer_obstacles_[group] = *answer;
}

std::shared_ptr<MappedPeers> NcclTransport::map_peers(int64_t half_bytes, int group) {
  begin_set_up("opening windows (transport=lsa, which must be in every rank's spec)");
  detail::make_current(setup_.device);
  std::shared_ptr<NcclMemory> memory =
      NcclMemory::allocate(api_, static_cast<size_t>(peer_window_bytes(half_bytes)));
  // Registering waits for all ranks, even if one has no memory to register, so agree first.
  if (!agreed(memory != nullptr)) return nullptr;
  struct Made {
    std::shared_ptr<MappedPeers> windows;
    std::string error;
  };
  const auto made = std::make_shared<Made>();
  const bool returned = ask_nccl([made, alive = while_alive(), &api = api_, device = setup_.device,
                                  rank = rank(), ranks = group > 0 ? group : world(), half_bytes,
                                  patience = setup_.timeout, memory = std::move(memory)](ncclComm_t comm) {
    try {
      made->windows = make_nccl_windows(api, comm, device, rank, ranks, half_bytes, patience, alive, memory);
    } catch (const std::exception& error) {
      made->error = error.what();
    }
  });
  if (!returned) give_up("opening windows", fmt::format("no progress for {} ms", setup_.timeout.count()));
  if (!made->error.empty()) give_up("opening windows", made->error);
  if (!agreed(made->windows != nullptr)) return nullptr;
  std::lock_guard lock(mutex_);
  std::erase_if(windows_, [](const auto& weak) { return weak.expired(); });
  windows_.push_back(made->windows);
  return made->windows;
}

// Returns whether `mine` is true on all ranks.
bool NcclTransport::agreed(bool mine) {
  const Stream stream =
      setup_.device.is_host() ? Stream::immediate_host() : Stream::create(setup_.device, "set-up");
  Buffer all(setup_.device, static_cast<size_t>(world()));
  const auto word = static_cast<uint8_t>(mine ? 1 : 0);
  store(stream, all.as<uint8_t>() + rank(), &word, 1);
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank()) continue;
    transfers.push_back({Transfer::Kind::send, peer, all.as<uint8_t>() + rank(), 1});
    transfers.push_back({Transfer::Kind::receive, peer, all.as<uint8_t>() + peer, 1});
  }
  exchange(stream, transfers, {mix(0, 0x70656572), "agreeing on peer memory"});
  uncount_sent(static_cast<uint64_t>(world() - 1));
  std::vector<uint8_t> answers(static_cast<size_t>(world()));
  copy(stream, answers.data(), all.data(), answers.size());
  stream.synchronize();
  throw_if_failed("agreeing on peer memory");
  return std::all_of(answers.begin(), answers.end(), [](uint8_t answer) { return answer != 0; });
}

void NcclTransport::run_kernel(const Stream& stream, MappedPeers& peers, uint64_t bytes,
                               const std::string& what, const std::function<void(const Stream&)>& work) {
  ++exchanges_;
  const std::string here = doing(what);
  throw_if_failed(here);
  std::unique_ptr<ExchangeMark> mark = mark_for(stream);
  mark->begin(stream);
  work(stream);
  mark->end(stream);
  count_sent(bytes);
  keep_watch(std::move(mark), here, from_all(peers.first_rank, peers.memory.world, bytes));
}

std::string NcclTransport::reported_by_kernels() {
  for (const auto& weak : windows_) {
    const auto alive = weak.lock();
    if (const std::string text = alive ? alive->failure() : ""; !text.empty()) return text;
  }
  return "";
}

}  // namespace gradwire

#endif  // GRADWIRE_HAS_NCCL
