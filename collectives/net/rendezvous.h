// How rank 0 publishes the location of its store to the other ranks.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "collectives/net/contact.h"
#include "collectives/net/socket.h"

namespace gradwire {

// Functions that publish and read the location of rank 0's store.
struct RendezvousCallbacks {
  std::string address = {};  // where rank 0 listens; empty: all addresses of its host
  std::function<void(const std::string& text)> publish;
  std::function<std::string()> read;  // returns "" until the location is published
  // Rank 0's sockets to the last ranks (see StoreServer's `invited`). The caller owns the sockets.
  std::vector<int> invited = {};
  // Returns whether the group is known to have failed to form. For ranks that cannot reach rank 0.
  std::function<bool()> given_up = nullptr;
};

// The location of rank 0's store.
struct StoreLocation {
  Contact store = {};       // has no addresses while the location is unknown
  std::string secret = {};  // the rendezvous's secret, in addition to the run's secret

  std::string text() const;
  // Parses a published location. Returns an empty location if `text` is not a published location.
  static StoreLocation parse(const std::string& text);
};

// Returns whether `text` has the form of a location published by rank 0.
bool is_store_location(const std::string& text);

// Returns callbacks that publish and read the location in the file `path`.
RendezvousCallbacks file_callbacks(const std::string& path);
// Removes the rendezvous file, unless a later group has reused the file name. Rank 0 calls it when rank 0
// leaves. `secret`: the run's secret. `key`: the group's key.
void remove_rendezvous_file(const std::string& path, const std::string& secret,
                            const std::string& key) noexcept;

// Return the path in file:///path and the endpoint in tcp://host:port. Throw BadInput if `rendezvous` is
// invalid.
std::string path_of_rendezvous(const std::string& rendezvous);
Endpoint endpoint_of_rendezvous(const std::string& rendezvous);

// Writes a regular file that only this user can read (runtime/util/output_file.h). Throws BadInput if `path`
// cannot be such a file, Error if writing fails.
void write_private_file(const std::string& path, const std::string& text);

}  // namespace gradwire
