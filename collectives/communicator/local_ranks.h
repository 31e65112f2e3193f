// The ranks of one process, each on a thread.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "collectives/communicator/communicator.h"

namespace gradwire {

// Runs body(communicator) for each communicator of `group`, each on a separate thread. Returns once all
// bodies have returned. The first exception aborts the communicators of the other ranks and is rethrown. A
// failure to start a thread counts as an exception.
void run_local_ranks(const std::vector<std::unique_ptr<Communicator>>& group,
                     const std::function<void(Communicator&)>& body);

}  // namespace gradwire
