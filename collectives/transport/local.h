// Ranks as threads of one process. Every rank's stream may be a host stream or a CUDA stream, and several
// ranks may share one GPU; all ranks must be on the same kind of device.
//
// Host: the receiver copies straight out of the sender's memory; one copy per transfer, none staged. The
// exchange runs on the stream's thread, so the enqueuing thread never blocks. CUDA: the receiver enqueues a
// device-to-device copy between two events. Pointers and events are swapped between the enqueuing threads, so
// exchange() returns only after the peers of this exchange have enqueued theirs (not after any data has
// moved). For the same reason it cannot be captured in a CUDA graph.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "collectives/transport/transport.h"

namespace gradwire {

// transports[r] belongs to rank r, which uses it from one thread at a time. A wait longer than `timeout` is
// an error.
std::vector<std::unique_ptr<Transport>> make_local_transports(const std::vector<Device>& devices,
                                                              std::chrono::milliseconds timeout);

}  // namespace gradwire
