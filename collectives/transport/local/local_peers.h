// Peer access between threads of one process.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "collectives/transport/local/local_hub.h"
#include "collectives/transport/peer_access.h"

namespace gradwire {

class LocalPeers final : public PeerAccess {
 public:
  LocalPeers(LocalHub& hub, int rank) : hub_(hub), rank_(rank) {}

  // Counts a call that this rank's threads have begun, although its stream may not have begun the call. The
  // calls of a captured graph cannot be counted.
  void count_call(bool captured) { captured ? uncounted_ = true : ++calls_; }

  std::string obstacle(int group) override;
  void run_kernel(const Stream& stream, MappedPeers& peers, uint64_t bytes, const std::string& what,
                  const std::function<void(const Stream&)>& work) override;

  // Called once per kernel that has been run or enqueued, with the kernel's number of bytes.
  std::function<void(uint64_t bytes)> on_sent;

 protected:
  std::shared_ptr<MappedPeers> map_peers(int64_t half_bytes, int group) override;

 private:
  Device device() const { return hub_.devices[static_cast<size_t>(rank_)]; }
  std::shared_ptr<LocalHub::PeerGroup> share(Buffer mine, int number);
  void run_on_host(MappedPeers& peers, const std::string& what,
                   const std::function<void(const Stream&)>& work);
  void launch(const Stream& stream, const MappedPeers& peers, const std::string& what,
              const std::function<void(const Stream&)>& work);

  LocalHub& hub_;
  const int rank_;
  int peer_groups_ = 0;
  uint64_t calls_ = 0;
  bool uncounted_ = false;
};

}  // namespace gradwire
