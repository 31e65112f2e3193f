// The ranks of one process, each on a thread.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "collectives/communicator/communicator.h"

namespace gradwire {

// Runs body(communicator) for each of `group` on a thread of its own and returns once all have returned. The first
// exception, also that of a thread which the system refuses, aborts the others' communicators and is thrown.
void run_local_ranks(const std::vector<std::unique_ptr<Communicator>>& group,
                     const std::function<void(Communicator&)>& body);

}  // namespace gradwire
