// A process's membership in a group: ranks find each other, are notified of failures, and wait for each
// other. Transports between processes are built on the membership.
//
// The rendezvous is a string, the same on every rank:
//   tcp://host:port   rank 0 listens on `port`; other ranks connect to `host` (MASTER_ADDR, MASTER_PORT)
//   file:///path      rank 0 listens on any port and writes its addresses and a secret to that shared file
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/net/listener.h"
#include "collectives/net/rendezvous.h"
#include "collectives/net/store.h"
#include "collectives/net/store_server.h"

namespace gradwire {

struct GroupOptions {
  std::string rendezvous;
  int rank = 0;
  int world = 1;
  std::chrono::milliseconds timeout{60'000};  // for each operation; also for joining if `joining` is unset
  std::chrono::milliseconds joining{0};
  // Secret that admits a process to the group. If empty, the secret comes from the environment (secret.h).
  // Without a secret, file:/// admits every process that can read the file, and tcp:// serves only this
  // machine, unless `insecure` or GRADWIRE_INSECURE=1.
  std::string secret = {};
  bool insecure = false;
  // The network interface and the range of ports at which this process listens for other ranks; the process
  // uses the first free port. If empty and {}, GRADWIRE_INTERFACE and GRADWIRE_PORTS give the values. Without
  // these variables the addresses follow from the rendezvous, and any port is used. The port in
  // tcp://host:port is independent of this range.
  std::string interface = {};
  PortRange ports = {};
  // The run of this rank (job.h); empty: from the environment. Ranks that are known to belong to different
  // runs do not connect.
  std::string job = {};
  // Replaces the rendezvous, which then only names the group in error texts.
  std::optional<RendezvousCallbacks> callbacks = {};

  std::chrono::milliseconds join_timeout() const { return joining.count() > 0 ? joining : timeout; }
};

// Fills unset fields of `options` from GRADWIRE_INTERFACE and GRADWIRE_PORTS. Throws BadInput if this host
// does not have the interface, or the ports are not a range.
void read_listening(GroupOptions& options);

class Membership {
 public:
  // Blocks until connected to rank 0's store. Throws BadInput for invalid options, CommError if the store
  // cannot be reached in time or rejects this rank.
  explicit Membership(const GroupOptions& options);
  ~Membership();

  int rank() const { return options_.rank; }
  int world() const { return options_.world; }
  std::chrono::milliseconds timeout() const { return options_.timeout; }
  StoreClient& store() { return *client_; }

  // Returns the key of the handshakes between ranks (handshake.h).
  const std::string& key() const { return key_; }

  const GroupOptions& options() const { return options_; }  // as completed from the environment

  // Returns the address at which this rank should listen for the other ranks. Returns "" if the rank should
  // listen at all its addresses, because it is unknown which addresses the other ranks can reach.
  std::string listening_address(SteadyClock::time_point deadline);
  // Returns one address at which all other machines can reach this machine; "" if there is no such address.
  // Collective.
  std::string address(SteadyClock::time_point deadline);
  // Blocks until all ranks have called barrier(). Collective, in the same order on every rank. Throws
  // CommError at the timeout and if the group fails.
  void barrier();
  // Sends a short message to rank 0 without waiting. Rank 0 takes each rank's messages in order.
  // send_message() and take_message() throw CommError if the group fails. take_message() also throws
  // CommError at the timeout.
  void send_message(const std::string& message) { client_->send_message(message); }
  std::string take_message(int from);
  // Announces an orderly departure, after which silence is not a failure. The destructor also announces it.
  void leave() { client_.reset(); }

 private:
  StoreLocation serve_at_any_port(RendezvousCallbacks& callbacks);
  StoreLocation serve_at(const Endpoint& endpoint);

  const RunningClock::Watch watch_;
  GroupOptions options_;
  std::string key_;
  std::optional<std::string> listen_at_;  // the callbacks' address, if there are callbacks
  std::string published_file_;            // the rendezvous file that rank 0 has written
  std::unique_ptr<StoreServer> server_;   // the store's server on rank 0; outlives client_
  std::unique_ptr<StoreClient> client_;
  int barriers_ = 0;
};

}  // namespace gradwire
