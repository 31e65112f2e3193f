// Listening sockets: addresses, port ranges, and accepting connections.
#pragma once

#include <chrono>
#include <optional>
#include <string>

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

// Accepts connections. Pauses briefly after the system has refused a descriptor or memory for a connection,
// because the connection stays pending and poll() on the listener would return at once.
class Acceptor {
 public:
  // Creates an acceptor for `listener`, which must outlive the acceptor.
  explicit Acceptor(const Socket& listener) : listener_(listener) {}
  // Returns the descriptor to poll: the listener, or -1 during a pause.
  int fd() const { return resting() ? -1 : listener_.fd(); }
  // Returns the timeout to pass to poll(): `at_most`, or less during a pause.
  std::chrono::milliseconds patience(std::chrono::milliseconds at_most) const;
  // Accepts one connection. Returns nullopt if no connection is pending or none can be accepted.
  std::optional<Socket> accept();
  // Returns the reason if the system has refused connections for longer than kGrace, otherwise "".
  std::string refused() const;

  static constexpr std::chrono::milliseconds kGrace{2000}, kRest{100};

 private:
  bool resting() const { return SteadyClock::now() < rests_until_; }

  const Socket& listener_;
  std::string why_;  // the reason of the latest refusal; "" after a success
  SteadyClock::time_point since_ = {}, rests_until_ = {};
};

}  // namespace gradwire
