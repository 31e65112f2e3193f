// A rendezvous through a caller's key-value store: gw_comm_options.store.
#pragma once

#include <chrono>
#include <string>

#include <gradwire/gradwire.h>
#include "collectives/net/rendezvous.h"

namespace gradwire::c_api {

// Returns a copy of the caller's struct. Throws BadInput if a field is invalid.
gw_store checked_store(const gw_store* store);

// Returns a rendezvous in which rank 0 publishes a text under one key of the store, and the other ranks read
// the key. Its functions throw CommError, which names the store, if a callback fails, returns another text
// than rank 0's, or does not return within `timeout` from now.
RendezvousCallbacks callbacks_of_store(const gw_store& store, std::chrono::milliseconds timeout);

}  // namespace gradwire::c_api
