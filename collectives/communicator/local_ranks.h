// The ranks of one process, each on a thread.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "collectives/transport/emulated_link.h"

namespace gradwire {

// Creates ranks as threads: Communicator::create_local(). `link`: if set, the ranks' messages pass through
// emulated links. schedule=auto then chooses by the links' speed, which is the same in every run.
std::vector<std::unique_ptr<Communicator>> create_local_ranks(const std::vector<Device>& devices,
                                                              std::chrono::milliseconds timeout,
                                                              const EmulatedLink& link);

// Runs body(communicator) for each communicator of `group`, each on a separate thread. Returns once all
// bodies have returned. The first exception aborts the communicators of the other ranks and is rethrown. A
// failure to start a thread counts as an exception.
void run_local_ranks(const std::vector<std::unique_ptr<Communicator>>& group,
                     const std::function<void(Communicator&)>& body);

}  // namespace gradwire
