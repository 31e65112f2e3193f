// Peer memory (runtime/device/peers.h) that NCCL maps, over NVLink: the part that reads NCCL's structures.
//
// The addresses come from a structure of NCCL's device API whose layout may change between versions. So only
// the version whose headers this was compiled with is used. With any other version, exchanges send messages.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "collectives/transport/nccl/nccl_api.h"
#include "collectives/transport/nccl/nccl_memory.h"
#include "collectives/transport/peer_access.h"

namespace gradwire {

// Returns why groups of `group` consecutive ranks cannot map each other's memory on this communicator; empty
// if they can. Collective. Calls NCCL.
std::string nccl_peer_memory_obstacle(const NcclApi& api, ncclComm_t comm, int rank, int world, int group);

// Registers `memory`, of peer_window_bytes(half_bytes), and returns the mapped memory of this rank's group;
// null if NCCL refuses. Collective. Throws CommError if NCCL's structures have another layout.
std::shared_ptr<MappedPeers> map_nccl_peers(const NcclApi& api, ncclComm_t comm, Device device, int rank,
                                            int group, int64_t half_bytes, std::chrono::nanoseconds patience,
                                            WhileAlive alive, std::shared_ptr<NcclMemory> memory);

}  // namespace gradwire
