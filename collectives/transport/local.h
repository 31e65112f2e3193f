// Ranks as threads of one process. A rank's stream may be a host stream or a CUDA stream, and several ranks
// may share one GPU; all ranks must be on the same kind of device.
//
// Host: the receiver copies directly from the sender's memory, one copy per transfer, with no staging. The
// exchange runs on the stream's thread, so the enqueuing thread never blocks.
// CUDA: the receiver enqueues a device-to-device copy between two events. The enqueuing threads swap pointers
// and events, so exchange() returns only after the peers of this exchange have enqueued theirs (but possibly
// before any data has moved). For the same reason it cannot be captured in a CUDA graph.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "collectives/transport/transport.h"

namespace gradwire {

// transports[r] belongs to rank r, which uses it from one thread at a time. A wait longer than `timeout` is
// an error.
std::vector<std::unique_ptr<Transport>> make_local_transports(const std::vector<Device>& devices,
                                                              std::chrono::milliseconds timeout);

// Why such kernels may wait for ever where ranks are on these devices, and what to do instead; empty if they do not.
// `lazily`: CUDA loads a kernel when it is first launched. That may wait for all that runs on the device: for a kernel
// of another rank there that waits for the one that cannot be launched.
std::string sharing_obstacle(const std::vector<Device>& devices, bool lazily);

}  // namespace gradwire
