// Peer windows (peer_access.h) over NCCL: memory that ranks have mapped for each other, over NVLink.
//
// The addresses come from a structure of NCCL's device API whose layout may change between versions. So only
// the version whose headers this was compiled with is used. With any other, exchanges send messages.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "collectives/transport/nccl/nccl_api.h"
#include "collectives/transport/nccl/nccl_memory.h"
#include "collectives/transport/peer_access.h"

namespace gradwire {

// Returns why groups of `group` consecutive ranks cannot have windows on this communicator; empty if they
// can. Collective. Calls NCCL.
std::string nccl_windows_obstacle(const NcclApi& api, ncclComm_t comm, int rank, int world, int group);

// Returns this rank's window in `memory`, of peer_window_bytes(half_bytes), and those of its group; null if
// NCCL refuses. Collective.
std::shared_ptr<MappedPeers> make_nccl_windows(const NcclApi& api, ncclComm_t comm, Device device, int rank,
                                               int group, int64_t half_bytes,
                                               std::chrono::nanoseconds patience, WhileAlive alive,
                                               std::shared_ptr<NcclMemory> memory);

}  // namespace gradwire
