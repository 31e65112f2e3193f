// Connects the ranks of a group of processes: one TCP connection per pair. Each rank connects to lower ranks
// and accepts connections from higher ranks.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "collectives/net/listener.h"
#include "collectives/net/socket.h"

namespace gradwire {

class TcpConnector {
 public:
  // Conditions that end a wait.
  struct Limits {
    SteadyClock::time_point deadline;
    int wake_fd;                        // readable when interrupted() may have changed
    std::function<bool()> interrupted;  // returns whether the group has failed
  };
  using Log = std::function<void(const std::string& line)>;

  // Listens at `address` of this machine (empty: at all its addresses) on one of `ports`, for peers that know
  // `key`. Throws CommError if it cannot listen.
  TcpConnector(int rank, int world, const std::string& address, const std::string& key,
               const PortRange& ports);

  // Returns the text of the Contact that other ranks need to connect.
  std::string contact() const;
  // Connects to every rank. Returns the connections by rank, then stops listening. contacts[r] is rank r's
  // contact. `rejected` gets log lines about unauthenticated peers (RejectedConnections). Throws CommError
  // that names the rank that cannot be reached.
  std::vector<Socket> connect(const std::vector<std::string>& contacts, const Limits& limits,
                              const Log& rejected);

 private:
  void accept_higher(std::vector<Socket>& sockets, const Limits& limits, const Log& rejected);
  std::string missing_ranks(const std::vector<Socket>& sockets) const;
  void accept_rank(std::vector<Socket>& sockets, PendingCallers::Caller caller) const;
  Socket connect_to(int rank, const std::string& contact, const Limits& limits) const;

  const int rank_, world_;
  Socket listener_;
  const std::string address_, name_, key_;
};

}  // namespace gradwire
