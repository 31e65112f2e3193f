// A process's membership in a group of processes: how the ranks find each other, hear of each other's
// failures, and wait for each other. Transports between processes are built on it.
//
// Rendezvous is text, the same on every rank:
//   tcp://host:port   rank 0 listens on `port`; `host` is where the others find it (MASTER_ADDR, MASTER_PORT)
//   file:///path      rank 0 listens anywhere and writes its addresses into that file, which all ranks can
//   read
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "collectives/rendezvous/store.h"

namespace gradwire {

struct GroupOptions {
  std::string rendezvous;
  int rank = 0;
  int world = 1;
  std::chrono::milliseconds timeout{60'000};  // for each operation, and for joining unless that is given
  std::chrono::milliseconds joining{0};

  std::chrono::milliseconds join_timeout() const { return joining.count() > 0 ? joining : timeout; }
};

class Membership {
 public:
  // Blocks until rank 0's store is reached. Throws BadInput for options that cannot work, CommError when the
  // store is not reached in time or refuses.
  explicit Membership(const GroupOptions& options);
  ~Membership();

  int rank() const { return options_.rank; }
  int world() const { return options_.world; }
  std::chrono::milliseconds timeout() const { return options_.timeout; }
  StoreClient& store() { return *client_; }

  // The address of this machine under which all others can reach it. Collective.
  std::string address(SteadyClock::time_point deadline);
  // Blocks until all ranks are here. Collective, in the same order on every rank. Throws CommError at the
  // timeout and when the group fails.
  void barrier();
  // Leaves a short message for rank 0; nobody waits. Rank 0 takes them, in each rank's order. Both throw
  // CommError when the group fails, take_message() also at the timeout.
  void send_message(const std::string& message) { client_->send_message(message); }
  std::string take_message(int from);
  // Says goodbye: from here on this rank's silence is no failure. The destructor does it too.
  void leave() { client_.reset(); }

 private:
  GroupOptions options_;
  std::string published_file_, token_;   // rank 0's, with file:///
  std::unique_ptr<StoreServer> server_;  // rank 0's; outlives its client
  std::unique_ptr<StoreClient> client_;
  int barriers_ = 0;
};

}  // namespace gradwire
