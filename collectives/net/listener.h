// Listening sockets: addresses, port ranges, and accepting connections.
#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/net/handshake.h"
#include "collectives/net/reach.h"
#include "collectives/net/socket.h"

namespace gradwire {

// Listens on the address named by `endpoint.host`; if the host is empty, on all addresses, IPv4 and IPv6.
// Port 0: any free port. Throws CommError, with the reason, on failure.
Socket listen_on(const Endpoint& endpoint);
// A range of ports. Both 0: any free port.
struct PortRange {
  int first = 0, last = 0;
};
// Throws BadInput that names `what` unless 1 <= first <= last <= 65535, or both ports are 0.
void check_ports(const std::string& what, const PortRange& ports);
// Parses a range such as "20000-20100", or one port. Throws BadInput that names `what` for an invalid text.
PortRange parse_ports(const std::string& what, const std::string& text);
// Listens at `address` on the first free port of the range. Throws CommError that names the range if no port
// of the range is free.
Socket listen_within(const PortRange& ports, const std::string& address);
int local_port(const Socket& socket);
// Accepts one connection. Returns nullopt if no connection is pending or the system refuses the connection;
// errno has the reason.
std::optional<Socket> accept_from(const Socket& listener);

// A listening socket and its unauthenticated peers: accepts connections, checks the handshake of each, and
// reads its first frame. Pauses briefly after the system has refused a descriptor or memory for a connection,
// because the connection stays pending and poll() would return at once.
class Listener {
 public:
  // A caller that has proved that it knows the key.
  struct Caller {
    Socket socket;
    std::string address;
    Frame first;
  };

  // Listens at `address` of this machine (empty: at all addresses) on one of `ports`, for peers that know
  // `key`. Draws a name. The handshake's purpose is `kind` and the name, which binds handshakes to this
  // listener, so that a connection cannot be relayed to another listener. Throws CommError if it cannot
  // listen.
  Listener(const std::string& kind, const std::string& address, const std::string& key,
           const PortRange& ports);
  // Serves a socket without a name.
  Listener(Socket socket, Credentials credentials)
      : credentials_(std::move(credentials)), socket_(std::move(socket)) {}
  Listener(const Listener&) = delete;

  // Returns how other processes reach this listener: see reach.h.
  Contact contact() const { return contact_of(socket_, address_, name_); }
  const std::string& address() const { return address_; }
  const std::string& key() const { return credentials_.key; }
  const Socket& socket() const { return socket_; }
  // Stops listening, and hangs up on the callers that are still pending.
  void close() {
    pending_.clear();
    socket_.close();
  }

  // Appends the sockets to poll to `entries`. poll() must return within tick().
  void add_entries(std::vector<pollfd>& entries);
  std::chrono::milliseconds tick() const;
  // Processes the results of poll() for the entries of add_entries(). Returns the callers whose first frame
  // is complete. Keeps at most kMaxUnauthenticated connections and two per rank of the group; rejects the
  // oldest connection beyond that limit. Accepts at most kMaxUnauthenticated connections per call, so that a
  // flood cannot delay serving the ranks.
  std::vector<Caller> advance(const std::vector<pollfd>& entries, size_t ranks);
  // Logs all pending callers as rejected for the reason `why`.
  void reject_all(const std::string& why) {
    for (const Pending& caller : pending_) log_rejected(caller.address, why);
  }
  // Removes and returns the log's lines about rejected connections (see RejectedConnections).
  std::vector<std::string> take_log() { return std::exchange(log_, {}); }
  // Returns why the system refused the latest connection; "" after a success.
  const std::string& refusal() const { return refused_; }
  // Returns the reason if the system has refused connections for longer than kGrace, otherwise "".
  std::string refused() const {
    return !refused_.empty() && SteadyClock::now() >= refused_since_ + kGrace ? refused_ : "";
  }

 private:
  static constexpr std::chrono::milliseconds kGrace{2000}, kPause{100};
  struct Pending {
    Socket socket;
    std::string address;
    std::unique_ptr<Handshake> handshake;  // null once the caller has proved the key
    std::string received = {};             // the received bytes of the first frame
    SteadyClock::time_point until = SteadyClock::now() + 2 * kHandshakeTime;
  };

  std::optional<Frame> read_first(Pending& caller);
  void log_rejected(const std::string& address, const std::string& why) {
    if (std::string line = rejected_.note(address, why); !line.empty()) log_.push_back(std::move(line));
  }

  const std::string address_, name_ = "-";
  const Credentials credentials_;
  Socket socket_;
  std::vector<Pending> pending_;  // in the order of arrival, oldest first
  size_t entry_ = 0;              // index of the socket's entry among the polled entries
  std::string refused_;           // see refusal()
  SteadyClock::time_point refused_since_ = {}, paused_until_ = {};
  RejectedConnections rejected_;
  std::vector<std::string> log_;
};

// The group's side of admitting new ranks; membership.h is the joiner's side.
//
// Joiners send their request to any rank's Quorum. The lowest rank keeps the joiners waiting; the other ranks
// redirect the joiners to the lowest rank. Between two calls the group invites the joiners that still answer.
// All ranks then form a group with the joiners as the highest ranks.

// Holds the waiting joiners. Any thread may call the member functions.
class AdmissionQueue {
 public:
  struct Joiner {
    std::string contact;
    Socket socket;
  };

  // Opens admission: joiners may wait while ranks and joiners are fewer than `most`. `validate` gets a
  // joiner's description of itself and returns why the joiner is rejected, or "". request() calls `validate`.
  void open(int most, std::function<std::string(const std::string& about)> validate) {
    std::lock_guard lock(mutex_);
    most_ = most;
    validate_ = std::move(validate);
  }
  // Closes admission and notifies waiting joiners that the run has ended.
  void close();
  // Returns how many joiners wait.
  int waiting() const { return count_; }
  // Returns the waiting joiners that still answer. Only the lowest rank calls it. Takes at most a second.
  std::vector<Joiner> invite();

  // Answers a joiner's request to the lowest rank of a group of `ranks` ranks: keeps the joiner waiting or
  // rejects it.
  void request(Socket socket, const Message& request, int ranks);
  // Appends the sockets of waiting joiners to `entries`, so that poll() reports joiners that hang up.
  void add_entries(std::vector<pollfd>& entries) const {
    std::lock_guard lock(mutex_);
    for (const Joiner& joiner : waiting_) entries.push_back({joiner.socket.fd(), POLLRDHUP, 0});
  }
  // Removes joiners that have hung up. Once per second, notifies the remaining joiners that they are still
  // waiting.
  void update();

 private:
  mutable std::mutex mutex_;
  int most_ = 0;
  std::function<std::string(const std::string&)> validate_;
  std::vector<Joiner> waiting_;
  std::atomic<int> count_ = 0;
  SteadyClock::time_point notified_at_ = {};
};

}  // namespace gradwire
