#include "collectives/transport/peer_access.h"

#include <fmt/format.h>

#include <atomic>
#include <new>

namespace gradwire {

MappedPeers::MappedPeers(Device device, int place, int ranks, int64_t half_bytes,
                         std::chrono::nanoseconds patience)
    : report(Buffer::pinned(device, sizeof(PeerReport))) {
  memory.rank = place;
  memory.world = ranks;
  memory.half_bytes = half_bytes;
  memory.report = new (report.data()) PeerReport();
  memory.patience_ns = patience.count();
}

void MappedPeers::stop() {
  std::atomic_ref(memory.report->stop).store(1, std::memory_order_release);
}

std::string MappedPeers::failure() const {
  const uint32_t missing = std::atomic_ref(memory.report->missing).load(std::memory_order_acquire);
  if (missing == 0) return "";
  return fmt::format("an allreduce over peer memory waited {} ms for rank {} at its barrier {}",
                     memory.patience_ns / 1'000'000, first_rank + static_cast<int>(missing) - 1,
                     memory.report->barrier + 1);
}

std::shared_ptr<MappedPeers> PeerAccess::open(int64_t half_bytes, bool shared, int group) {
  half_bytes = (half_bytes + 255) / 256 * 256;
  if (!obstacle(group).empty()) return nullptr;
  std::shared_ptr<MappedPeers>& common = shared_[group];
  if (shared && common && common->memory.half_bytes >= half_bytes) return common;
  auto made = map_peers(half_bytes, group);
  if (shared && made) common = made;
  return made;
}

}  // namespace gradwire
