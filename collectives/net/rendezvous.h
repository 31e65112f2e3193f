// How rank 0 publishes the location of its store to the other ranks.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "collectives/net/contact.h"
#include "collectives/net/socket.h"

namespace gradwire {

// A rendezvous by callbacks.
struct RendezvousCallbacks {
  std::string address = {};  // where rank 0 listens; empty: at all its addresses
  std::function<void(const std::string& text)> publish;
  std::function<std::string()> read;  // returns "" until published
  // Rank 0's sockets to the last ranks (see StoreServer's `invited`). Owned by the caller.
  std::vector<int> invited = {};
  // Returns whether the group is known not to form, for ranks that cannot reach rank 0.
  std::function<bool()> given_up = nullptr;
};

// The location of rank 0's store.
struct StoreLocation {
  Contact store = {};       // without addresses: not known yet
  std::string secret = {};  // of this rendezvous, in addition to the run's secret

  std::string text() const;
  // Returns an empty location unless `text` is the text of one.
  static StoreLocation parse(const std::string& text);
};

// Returns whether `text` may have been published by rank 0.
bool is_store_location(const std::string& text);

// A rendezvous by the file `path`.
RendezvousCallbacks file_callbacks(const std::string& path);
// Removes the file when rank 0 leaves, unless a later group has reused the name. `secret`: of the run. `key`:
// of the group.
void remove_rendezvous_file(const std::string& path, const std::string& secret,
                            const std::string& key) noexcept;

// Return the path in file:///path and the endpoint in tcp://host:port. Throw BadInput if it is invalid.
std::string path_of_rendezvous(const std::string& rendezvous);
Endpoint endpoint_of_rendezvous(const std::string& rendezvous);

// Writes a regular file that only this user can read (runtime/util/output_file.h). Throws BadInput if `path`
// cannot be such a file, Error if writing fails.
void write_private_file(const std::string& path, const std::string& text);

}  // namespace gradwire
