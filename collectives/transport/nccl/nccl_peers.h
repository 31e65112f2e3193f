// Peer access over NCCL: memory that ranks map for each other, over NVLink.
//
// The addresses come from a structure of NCCL's device API. Its layout may change between versions, so peer
// access needs exactly the version whose headers this file was compiled with. With any other version,
// exchanges send messages.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "collectives/transport/nccl/nccl_communicator.h"
#include "collectives/transport/nccl/nccl_watch.h"
#include "collectives/transport/peer_access.h"
#include "runtime/device/device.h"

namespace gradwire {

class NcclTransport;

class NcclPeers final : public PeerAccess {
 public:
  // Creates the capability. All arguments must outlive the object.
  NcclPeers(NcclTransport& transport, NcclCommunicator& comm, NcclWatch& watch)
      : transport_(transport), comm_(comm), watch_(watch) {}

  // Returns why this group cannot have peer access, or "". The first call for a group is collective and
  // blocks.
  std::string obstacle(int group) override;
  void run_kernel(const Stream& stream, MappedPeers& peers, uint64_t bytes, const std::string& what,
                  const std::function<void(const Stream&)>& work) override;
  // Releases the shared memory. Must be called while the communicator exists.
  void release() { release_shared(); }

 protected:
  std::shared_ptr<MappedPeers> map_peers(int64_t half_bytes, int group) override;

 private:
  ncclResult_t ask(std::function<void(ncclComm_t)> question);

  NcclTransport& transport_;
  NcclCommunicator& comm_;
  NcclWatch& watch_;
  std::map<int, std::string> obstacles_;  // results of obstacle(), by group
};

}  // namespace gradwire
