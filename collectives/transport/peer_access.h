// Peer access: the ranks of a group read and write each other's memory (runtime/device/peers.h). Some
// transports have this capability; see transport.h.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "runtime/device/device.h"
#include "runtime/device/peers.h"

namespace gradwire {

// One rank's mapping of the peer memory of all ranks, or of a group of consecutive ranks.
struct MappedPeers {
  PeerMemory memory;           // its report is the member `report`
  int first_rank = 0;          // rank of the first window
  Buffer report;               // a PeerReport in page-locked memory
  std::shared_ptr<void> keep;  // keeps the memory of all ranks alive

  // Allocates the error report and initializes `memory`, except for the addresses of the ranks' memory.
  // `place`: this rank's place among the group's `ranks`.
  MappedPeers(Device device, int place, int ranks, int64_t half_bytes, std::chrono::nanoseconds patience);
  // Ends the kernels that wait for other ranks.
  void stop();
  // Returns the kernel's error report, "waited 60000 ms for rank 3 at barrier 1 ...", or "" without an error.
  std::string failure() const;
};

class PeerAccess {
 public:
  virtual ~PeerAccess() = default;
  // Returns the same text as Transport::peer_access_obstacle().
  virtual std::string obstacle(int group) = 0;
  // Returns peer memory with halves of at least `half_bytes` bytes; null on all ranks if impossible.
  // `shared`: may return the memory of an earlier call, for kernels that all run on one stream. `group`: maps
  // only the memory of this rank's group. Collective; blocks.
  std::shared_ptr<MappedPeers> open(int64_t half_bytes, bool shared, int group = 0);
  // Enqueues `work`, a kernel over this memory; other ranks read `bytes` from this rank. The work has an
  // exchange's deadline, and its failure fails the group. `what` must stay valid until the stream has passed
  // this point.
  virtual void run_kernel(const Stream& stream, MappedPeers& peers, uint64_t bytes, const std::string& what,
                          const std::function<void(const Stream&)>& work) = 0;

 protected:
  virtual std::shared_ptr<MappedPeers> map_peers(int64_t half_bytes, int group) = 0;
  // Releases the memory that open() shares between calls.
  void release_shared() { shared_.clear(); }

 private:
  std::map<int, std::shared_ptr<MappedPeers>> shared_;  // the memory that open() shares, by group
};

}  // namespace gradwire
