// The unauthenticated peers of a listener: accepts connections, checks the handshake of each, and reads its
// first frame.
#pragma once

#include <poll.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/net/handshake.h"
#include "collectives/net/listener.h"
#include "collectives/net/message.h"
#include "collectives/net/socket.h"

namespace gradwire {

class PendingCallers {
 public:
  // A caller that has proved that it knows the key.
  struct Caller {
    Socket socket;
    std::string address;
    Frame first;
  };

  // Serves `listener`. `listener` and `credentials` must outlive the object.
  PendingCallers(const Socket& listener, const Credentials& credentials)
      : acceptor_(listener), credentials_(credentials) {}

  // Appends the sockets to poll to `entries`.
  void add_entries(std::vector<pollfd>& entries);
  // Processes the results of poll() for the entries of add_entries(). Returns the callers whose first frame
  // is complete. Keeps at most kMaxUnauthenticated connections and two per rank of the group; rejects the
  // oldest connection beyond that limit. Accepts at most kMaxUnauthenticated connections per call, so that a
  // flood cannot delay serving the ranks.
  std::vector<Caller> advance(const std::vector<pollfd>& entries, size_t ranks);
  // Logs all pending callers as rejected for the reason `why`.
  void reject_all(const std::string& why);
  // Removes and returns the log's lines about rejected connections (see RejectedConnections).
  std::vector<std::string> take_log();

  bool empty() const { return pending_.empty(); }
  // Returns why the system refuses connections, as Acceptor::refused() does.
  std::string refused() const { return acceptor_.refused(); }
  std::chrono::milliseconds patience(std::chrono::milliseconds at_most) const {
    return acceptor_.patience(at_most);
  }

 private:
  struct Pending {
    Socket socket;
    std::string address;
    std::unique_ptr<Challenge> challenge;  // null once the caller has proved the key
    std::string received = {};             // the received bytes of the first frame
    SteadyClock::time_point until = SteadyClock::now() + 2 * kHandshakeTime;
  };

  std::optional<Frame> read_first(Pending& caller);
  void log_rejected(const std::string& address, const std::string& why);

  Acceptor acceptor_;
  const Credentials& credentials_;
  std::vector<Pending> pending_;  // in the order of arrival, oldest first
  size_t entry_ = 0;              // index of the acceptor's entry among the polled entries
  RejectedConnections rejected_;
  std::vector<std::string> log_;
};

}  // namespace gradwire
