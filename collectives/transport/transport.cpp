#include "collectives/transport/transport.h"

#include <fmt/format.h>

#include "runtime/util/error.h"

namespace gradwire {

void Transport::send_message(const std::string&) {
  throw Error(fmt::format("the {} transport carries no messages", name()));
}

std::string Transport::take_message(int) {
  throw Error(fmt::format("the {} transport carries no messages", name()));
}

Buffer Transport::exchange_memory(size_t bytes) {
  return Buffer(device(), bytes);
}

std::unique_ptr<Transport> Transport::shrink(const std::vector<int>&) {
  throw BadInput(fmt::format("the {} transport cannot go on without some of its ranks", name()));
}

std::unique_ptr<Transport> Transport::regroup(std::chrono::milliseconds, std::vector<int>&) {
  throw BadInput(fmt::format("the ranks of a {} transport cannot find out which of them are left", name()));
}

void Transport::open_admission(int, std::function<std::string(const std::string&)>) {
  throw BadInput(fmt::format("no new ranks can join over the {} transport", name()));
}

std::unique_ptr<Transport> Transport::grow() {
  throw BadInput(fmt::format("no new ranks can join over the {} transport", name()));
}

std::unique_ptr<Transport> Transport::split(const std::vector<int>&) {
  throw BadInput(fmt::format("the {} transport cannot be split", name()));
}

std::string Transport::peer_obstacle(int) {
  return fmt::format("over the {} transport ranks do not read each other's memory", name());
}

std::shared_ptr<PeerWindows> Transport::peer_windows(int64_t half_bytes, bool shared, int group) {
  half_bytes = (half_bytes + 255) / 256 * 256;
  if (!peer_obstacle(group).empty()) return nullptr;
  std::shared_ptr<PeerWindows>& common = shared_windows_[group];
  if (shared && common && common->memory.half_bytes >= half_bytes) return common;
  auto made = make_peer_windows(half_bytes, group);
  if (shared && made) common = made;
  return made;
}

std::shared_ptr<PeerWindows> Transport::make_peer_windows(int64_t, int) {
  return nullptr;
}

std::string Transport::library_obstacle() const {
  return fmt::format(
      "over the {} transport there is no NCCL; start a process for each GPU (torchrun, srun or mpirun), or "
      "use "
      "schedule=auto",
      name());
}

void Transport::allreduce(const Stream&, const float*, float*, int64_t, bool, uint64_t,
                          const std::string& what) {
  throw Error(fmt::format("{}: {}", what, library_obstacle()));
}

void Transport::run_over_peers(const Stream&, PeerWindows&, uint64_t, const std::string& what,
                               const std::function<void(const Stream&)>&) {
  throw Error(fmt::format("{}: {}", what, peer_obstacle()));
}

}  // namespace gradwire
