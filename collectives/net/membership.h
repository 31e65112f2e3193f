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
#include "collectives/net/quorum.h"
#include "collectives/net/store.h"
#include "collectives/net/store_server.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"

namespace gradwire {

struct GroupOptions {
  std::string rendezvous;
  int rank = 0;
  int world = 1;
  std::chrono::milliseconds timeout{60'000};  // for each operation; also for joining if `joining` is unset
  std::chrono::milliseconds joining{0};
  // Secret that admits a process to the group. If empty, the secret comes from the environment (handshake.h).
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
  // The run of this rank; empty: from the environment. Ranks that are known to belong to different
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
  std::string listening_address(SteadyClock::time_point deadline) {
    return listen_at_ ? *listen_at_ : address(deadline);
  }
  // Returns one address at which all other machines can reach this machine; "" if there is no such address.
  // Collective.
  std::string address(SteadyClock::time_point deadline);
  // Blocks until all ranks have called barrier(). Collective, in the same order on every rank. Throws
  // CommError at the timeout and if the group fails.
  void barrier();
  // Returns the oldest message that rank `from` has sent to rank 0 (StoreClient::send_message()). Only rank 0
  // calls it. Throws CommError at the timeout and if the group fails.
  std::string take_message(int from);
  // Announces an orderly departure, after which silence is not a failure. The destructor also announces it.
  void leave() { client_.reset(); }

 private:
  StoreLocation serve_at_any_port(RendezvousCallbacks& callbacks);
  void find_store(StoreLocation& location, const RendezvousCallbacks* callbacks, const std::string& file,
                  SteadyClock::time_point deadline);

  const RunningClock::Watch watch_;
  GroupOptions options_;
  std::string key_;
  std::optional<std::string> listen_at_;  // the callbacks' address, if there are callbacks
  std::string published_file_;            // the rendezvous file that rank 0 has written
  std::unique_ptr<StoreServer> server_;   // the store's server on rank 0; outlives client_
  std::unique_ptr<StoreClient> client_;
  int barriers_ = 0;
};

// A process that joins a running group; listener.h is the group's side.

struct JoinRequest {
  // Returns the text by which a process finds a group; "" while there is none. The first line is the group's
  // secret, or "-"; the next lines are the contacts of the group's ranks. A process that can read the text
  // may join, unless the run has another secret.
  std::function<std::string()> invitation;
  std::string about = {};  // this process's description of itself, for `validate` of open_admission()
  // Longest time that this process waits in a group's queue; 0: no limit.
  std::chrono::milliseconds longest{0};
};

// The new group, as described to an admitted joiner.
struct Admitted {
  int rank = 0, world = 1;
  int number = 0;             // the number of groups before this group
  std::string name = {};      // the group's name
  std::string location = {};  // the location of the group's store
  // The joiner's quorum.
  std::shared_ptr<Quorum> quorum = nullptr;
  // The connection to the rank that admits this process. If the connection closes before this process has
  // sent `joined`, the group continues without this process.
  Socket host = {};

  // Encode and decode the members that describe the group.
  std::string encode() const;
  static Admitted decode(const std::string& text);  // throws CommError
};
// Sends each joiner the joiner's rank in the group `next`, which has `world` ranks followed by the joiners.
// `number`: the number of groups before `next`. A joiner that does not receive the message is detected when
// the group forms.
void admit(const std::vector<AdmissionQueue::Joiner>& joiners, const Quorum::NextGroup& next, int world,
           int number);

class NoRankAnswers : public CommError {
 public:
  using CommError::CommError;
};

// Blocks until the group admits this process. Uses the secret, the interface and the ports of `group`. Throws
// BadInput, with the reason, if the group rejects the process. Throws NoRankAnswers if no rank answers within
// the join timeout, for example because the run has ended.
Admitted request_admission(const GroupOptions& group, const JoinRequest& join);

// The run to which a process belongs, if known. Two runs can use the same port by mistake, and their ranks
// would train together. If both ends of a connection know their run and the runs differ, the connection is
// rejected with an error that names both runs.

// Returns GRADWIRE_JOB, or the launcher's id of the run: "Slurm job 123, step 0". The text is the same on all
// ranks of a run. Returns "" if the run is unknown; an unknown run matches any run. Throws BadInput for a
// text that is too long. `lookup` returns a variable's value; null: not set.
std::string job_from_environment(const std::function<const char*(const char*)>& lookup = environment);

// Part of the error text that rejects a rank of another run.
inline constexpr const char* kOtherJob = "belongs to another run";

}  // namespace gradwire
