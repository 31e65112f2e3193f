// A caller's key-value store as a rendezvous: gw_comm_options.store.
#pragma once

#include <chrono>
#include <string>

#include <gradwire/gradwire.h>
#include "collectives/net/rendezvous.h"

namespace gradwire::c_api {

// Reads and checks the struct. Throws BadInput.
gw_store checked_store(const gw_store* store);

// Rank 0 publishes under one key of the store, where the others read. Both throw CommError, naming the store,
// if a callback fails, gives what no rank 0 has written, or is not back by now + `timeout`.
RendezvousCallbacks callbacks_of_store(const gw_store& store, std::chrono::milliseconds timeout);

}  // namespace gradwire::c_api
