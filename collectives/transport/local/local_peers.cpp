#include "collectives/transport/local/local_peers.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstddef>

#include "collectives/transport/local/local.h"
#include "runtime/device/properties.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"

namespace gradwire {

std::string LocalPeers::obstacle(int group) {
  const int ranks = group > 0 ? group : hub_.world;
  if (hub_.links && hub_.links->link().between(0, ranks - 1))
    return "an emulated link carries only messages (--link)";
  if (ranks > kMostPeers) return fmt::format("{} ranks; at most {} can", ranks, kMostPeers);
  for (int a = 0; a < hub_.world; ++a) {
    for (int b = a / ranks * ranks; b < std::min(hub_.world, a / ranks * ranks + ranks); ++b) {
      const Device from = hub_.devices[static_cast<size_t>(a)], to = hub_.devices[static_cast<size_t>(b)];
      if (!enable_access(from, to))
        return fmt::format("{} cannot access memory of {}", from.name(), to.name());
    }
  }
  const char* const blocking = environment("CUDA_LAUNCH_BLOCKING");
  return sharing_obstacle(hub_.devices, loads_kernels_lazily(),
                          blocking != nullptr && std::string(blocking) != "0");
}

std::shared_ptr<LocalHub::PeerGroup> LocalPeers::share(Buffer mine, int number) {
  std::unique_lock lock(hub_.mutex);
  std::shared_ptr<LocalHub::PeerGroup>& entry = hub_.peer_groups[number];
  if (!entry) entry = std::make_shared<LocalHub::PeerGroup>(hub_.world);
  const std::shared_ptr<LocalHub::PeerGroup> group = entry;
  const auto me = static_cast<size_t>(rank_);
  group->memory[me] = std::move(mine);
  group->arrived[me] = true;
  if (!uncounted_) group->calls_before[me] = calls_;
  hub_.compare_peer_memory();
  ++group->ready;
  hub_.wake_all();
  hub_.wait(
      lock, rank_, [&] { return group->ready == hub_.world; },
      [&] { return fmt::format("mapping peer memory: {} of {} ranks have", group->ready, hub_.world); });
  return group;
}

std::shared_ptr<MappedPeers> LocalPeers::map_peers(int64_t half_bytes, int ranks) {
  const auto bytes = static_cast<size_t>(peer_window_bytes(half_bytes));
  Buffer mine(device(), bytes);
  const Stream stream = device().is_host() ? Stream::immediate_host() : Stream::create(device(), "set-up");
  fill_zero(stream, mine.data(), bytes);
  stream.synchronize();
  if (ranks == 0) ranks = hub_.world;
  auto peers = std::make_shared<MappedPeers>(device(), rank_ % ranks, ranks, half_bytes, hub_.timeout);
  peers->first_rank = rank_ / ranks * ranks;

  const int number = peer_groups_++;
  const std::shared_ptr<LocalHub::PeerGroup> group = share(std::move(mine), number);
  PeerMemory& m = peers->memory;
  for (int r = 0; r < ranks; ++r)
    m.windows[r] = group->memory[static_cast<size_t>(peers->first_rank + r)].as<std::byte>();
  for (const Device& d : hub_.devices) {
    const auto alike = static_cast<int>(std::count(hub_.devices.begin(), hub_.devices.end(), d));
    m.blocks = std::min(m.blocks, peer_blocks(multiprocessors(d), alike));
  }
  detail::make_current(device());
  peers->keep = group;
  std::lock_guard lock(hub_.mutex);
  std::erase_if(hub_.mapped, [](const auto& weak) { return weak.expired(); });
  hub_.mapped.push_back(peers);
  if (!hub_.failure().empty()) peers->stop();
  if (++group->taken == hub_.world) hub_.peer_groups.erase(number);
  return peers;
}

void LocalPeers::run_kernel(const Stream& stream, MappedPeers& peers, uint64_t bytes, const std::string& what,
                            const std::function<void(const Stream&)>& work) {
  if (!device().is_host()) {
    hub_.check(rank_);
    launch(stream, peers, what, work);
    return on_sent(bytes);
  }
  stream.submit([this, &peers, bytes, &what, work] {
    run_on_host(peers, what, work);
    on_sent(bytes);
  });
}

void LocalPeers::run_on_host(MappedPeers& peers, const std::string& what,
                             const std::function<void(const Stream&)>& work) {
  const Stream now = Stream::immediate_host();
  try {
    work(now);
    now.synchronize();
  } catch (const CommError&) {
    std::lock_guard lock(hub_.mutex);
    const std::string cause = peers.failure();  // "" if another rank stopped this kernel
    if (hub_.failure().empty()) hub_.fail(fmt::format("rank {}: {}: {}", rank_, what, cause));
    throw CommError(fmt::format("rank {}: {}: {}", rank_, what, hub_.failure()));
  }
}

// Launches a kernel that waits for the other ranks' kernels. Two rendezvous of the ranks' threads enclose the
// launch. Otherwise a rank could block in a call that waits for another rank's kernel (cudaFree, a kernel's
// first launch) and never launch its part.
void LocalPeers::launch(const Stream& stream, const MappedPeers& peers, const std::string& what,
                        const std::function<void(const Stream&)>& work) {
  auto& group = *static_cast<LocalHub::PeerGroup*>(peers.keep.get());
  hub_.rendezvous(group, rank_, what + ", before its kernel is launched");
  try {
    work(stream);
  } catch (const std::exception& error) {
    std::lock_guard lock(hub_.mutex);
    hub_.fail(fmt::format("rank {}: {}: {}", rank_, what, error.what()));
    throw;
  }
  hub_.rendezvous(group, rank_, what + ", after its kernel is launched");
}

}  // namespace gradwire
