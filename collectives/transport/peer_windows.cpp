#include "collectives/transport/peer_windows.h"

#include <fmt/format.h>

#include <atomic>

namespace gradwire {

void PeerWindows::stop() {
  std::atomic_ref(memory.report->stop).store(1, std::memory_order_release);
}

std::string PeerWindows::failure() const {
  const uint32_t missing = std::atomic_ref(memory.report->missing).load(std::memory_order_acquire);
  if (missing == 0) return "";
  return fmt::format("an allreduce over peer memory waited {} ms for rank {} at its barrier {}",
                     memory.patience_ns / 1'000'000, first + static_cast<int>(missing) - 1,
                     memory.report->barrier + 1);
}

}  // namespace gradwire
