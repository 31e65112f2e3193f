// A process's membership in a group of processes: how the ranks find each other, learn of each other's
// failures, and wait for each other. Transports between processes are built on it.
//
// The rendezvous is a string, the same on every rank:
//   tcp://host:port   rank 0 listens on `port`; the others find it at `host` (MASTER_ADDR, MASTER_PORT)
//   file:///path      rank 0 listens on any port and writes its addresses, and a secret, to that shared file
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/rendezvous/store.h"

namespace gradwire {

// Where rank 0 says how it can be reached, for those who may know.
struct Board {
  std::string address = {};  // where it listens; empty: at all its addresses
  std::function<void(const std::string& text)> publish;
  std::function<std::string()> read;  // empty as long as nothing has been published
  // Rank 0's sockets to the last ranks: see StoreServer's `invited`. They stay the caller's.
  std::vector<int> invited = {};
  // Whether it is known that the group will not form, for ranks that cannot reach rank 0.
  std::function<bool()> given_up = nullptr;
};

// Whether rank 0 may have published this.
bool is_meeting(const std::string& text);

// Writes a regular file that only this user can read (runtime/output_file.h). Throws BadInput if `path`
// cannot be such a file, Error if writing fails.
void write_private_file(const std::string& path, const std::string& text);

struct GroupOptions {
  std::string rendezvous;
  int rank = 0;
  int world = 1;
  std::chrono::milliseconds timeout{60'000};  // for each operation, and for joining unless `joining` is set
  std::chrono::milliseconds joining{0};
  // Whoever knows it may join. Empty: the environment's (secret.h); with file:///, whoever can read the file may
  // join. Without any secret, tcp:// serves only this machine, unless `insecure` or GRADWIRE_INSECURE=1.
  std::string secret = {};
  bool insecure = false;
  // The network interface and the range of ports at which this process listens for other ranks; it uses the
  // first free port. Empty and {}: from GRADWIRE_INTERFACE and GRADWIRE_PORTS. Without these variables the
  // addresses follow from the rendezvous, and any port is used. The port in tcp://host:port is independent of
  // these ports.
  std::string interface = {};
  PortRange ports = {};
  // Which run this rank belongs to (job.h); empty: the environment's. Ranks of runs that are known to differ do not meet.
  std::string job = {};
  std::optional<Board> board = {};  // in place of the rendezvous, which is then a name for error texts

  std::chrono::milliseconds join_timeout() const { return joining.count() > 0 ? joining : timeout; }
};

// Fills unset fields of `options` from GRADWIRE_INTERFACE and GRADWIRE_PORTS. Throws BadInput if the
// interface is not one of this host, or the ports are not a range.
void read_listening(GroupOptions& options);

class Membership {
 public:
  // Blocks until it has reached rank 0's store. Throws BadInput for invalid options, CommError if the store
  // cannot be reached in time or refuses.
  explicit Membership(const GroupOptions& options);
  ~Membership();

  int rank() const { return options_.rank; }
  int world() const { return options_.world; }
  std::chrono::milliseconds timeout() const { return options_.timeout; }
  StoreClient& store() { return *client_; }

  // What connections between the ranks prove to know (handshake.h).
  const std::string& key() const { return key_; }

  const GroupOptions& options() const { return options_; }  // completed from the environment

  // Returns the address at which this rank should listen for the other ranks. Empty: all its addresses,
  // because it is unknown which addresses the other ranks can reach.
  std::string listening_address(SteadyClock::time_point deadline);
  // Returns one address at which all other machines can reach this machine, if there is one. Collective.
  std::string address(SteadyClock::time_point deadline);
  // Blocks until all ranks have called it. Collective, in the same order on every rank. Throws CommError at
  // the timeout and if the group fails.
  void barrier();
  // Sends a short message to rank 0 without waiting. Rank 0 takes each rank's messages in order. Both throw
  // CommError if the group fails, take_message() also at the timeout.
  void send_message(const std::string& message) { client_->send_message(message); }
  std::string take_message(int from);
  // Announces an orderly departure: from here on silence is no failure. The destructor does so too.
  void leave() { client_.reset(); }

 private:
  const RunningClock::Watch watch_;
  GroupOptions options_;
  std::string key_;
  std::optional<std::string> listen_at_;  // the board's address, if there is a board
  std::string published_file_;            // rank 0's, with file:///
  std::unique_ptr<StoreServer> server_;   // rank 0's; outlives its client
  std::unique_ptr<StoreClient> client_;
  int barriers_ = 0;
};

}  // namespace gradwire
