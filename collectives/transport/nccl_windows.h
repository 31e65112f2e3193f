// Windows (peer_windows.h) over NCCL: memory that its ranks have mapped for each other, over NVLink.
//
// The addresses come from a structure of NCCL's device API whose layout is not promised between versions. So only
// the version whose headers this was compiled with is used, and with any other, messages are sent.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "collectives/transport/nccl_api.h"
#include "collectives/transport/nccl_memory.h"
#include "collectives/transport/peer_windows.h"

namespace gradwire {

// Why groups of so many consecutive ranks cannot have windows on this communicator; empty if they can. Collective, and
// asks NCCL.
std::string nccl_windows_obstacle(const NcclApi& api, ncclComm_t comm, int rank, int world, int group);

// This rank's window in `memory`, of peer_window_bytes(half_bytes), with those of its group; null if NCCL refuses.
// Collective.
std::shared_ptr<PeerWindows> make_nccl_windows(const NcclApi& api, ncclComm_t comm, Device device, int rank,
                                               int group, int64_t half_bytes,
                                               std::chrono::nanoseconds patience, WhileAlive alive,
                                               std::shared_ptr<NcclMemory> memory);

}  // namespace gradwire
