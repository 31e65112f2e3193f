// Ranks as threads of one process. A rank's stream may be a host or a CUDA stream. Several ranks may share
// one GPU. All ranks must be on the same kind of device.
//
// Host: the receiver copies directly from the sender's memory, one copy per transfer, without staging. The
// exchange runs on the stream's thread, so the enqueuing thread never blocks. CUDA: the receiver enqueues a
// device-to-device copy between two events. The enqueuing threads swap pointers and events, so exchange()
// returns only after its peers have enqueued their parts, possibly before any data has moved. For the same
// reason exchange() cannot be captured in a CUDA graph.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "collectives/transport/emulated_link.h"
#include "collectives/transport/transport.h"

namespace gradwire {

// Returns the ranks' transports: transports[r] belongs to rank r, and one thread at a time may use it. A wait
// longer than `timeout` is an error. `link`: if set, messages pass through emulated links; for ranks on the
// host.
std::vector<std::unique_ptr<Transport>> make_local_transports(const std::vector<Device>& devices,
                                                              std::chrono::milliseconds timeout,
                                                              const EmulatedLink& link = {});

}  // namespace gradwire
