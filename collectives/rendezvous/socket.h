// TCP sockets with deadlines, just enough for rendezvous: every call that waits returns at its deadline. Deadlines are on
// RunningClock, which stands still while this process is stopped.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "runtime/running_clock.h"
#include "runtime/standard_descriptors.h"

namespace gradwire {

using SteadyClock = RunningClock;

// Owns a file descriptor, above those of standard input, output and error.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(above_standard_descriptors(fd)) {}
  Socket(Socket&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Socket& operator=(Socket&& other) noexcept;
  ~Socket() { close(); }
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void close();

  // Addresses as numbers, e.g. "10.0.0.1"; empty when not connected.
  std::string local_address() const;
  std::string peer_address() const;
  // Whether the peer has closed it, or is gone, whatever it has sent before.
  bool hung_up() const;

 private:
  int fd_ = -1;
};

struct Endpoint {
  std::string host;
  int port = 0;
  std::string text() const;
};

// Listens on the address that `host` names; "" is all of them, IPv4 and IPv6. Port 0: any free port. Throws CommError with the
// reason if it cannot.
Socket listen_on(const Endpoint& endpoint);
// Both 0: any free port.
struct PortRange {
  int first = 0, last = 0;
};
// Throws BadInput that names `what` unless 1 <= first <= last <= 65535, or both are 0.
void check_ports(const std::string& what, const PortRange& ports);
// Parses "20000-20100", or one port. Throws BadInput that names `what`.
PortRange parse_ports(const std::string& what, const std::string& text);
// On the first free port of the range, at `address`. Throws CommError that names the range if there is none.
Socket listen_within(const PortRange& ports, const std::string& address);
int local_port(const Socket& socket);
// Empty when no connection is pending, or the system refuses one: see errno.
std::optional<Socket> accept_from(const Socket& listener);

// Accepts connections, and rests for a moment after the system has refused a descriptor or memory for one. (The
// connection stays pending then, so that poll() on the listener would return at once.)
class Acceptor {
 public:
  // `listener` must outlive this.
  explicit Acceptor(const Socket& listener) : listener_(listener) {}
  // What to poll: the listener, or -1 while this rests.
  int fd() const { return resting() ? -1 : listener_.fd(); }
  // How long a poll() may take: `at_most`, or less while this rests.
  std::chrono::milliseconds patience(std::chrono::milliseconds at_most) const;
  // Empty when no connection is pending, or none can be accepted.
  std::optional<Socket> accept();
  // Why connections have been refused by the system for longer than kGrace; else "".
  std::string refused() const;

  static constexpr std::chrono::milliseconds kGrace{2000}, kRest{100};

 private:
  bool resting() const { return SteadyClock::now() < rests_until_; }

  const Socket& listener_;
  std::string why_;  // "" since the latest success
  SteadyClock::time_point since_ = {}, rests_until_ = {};
};

// Ends a poll() in another thread.
class WakeEvent {
 public:
  // Throws OutOfResources.
  WakeEvent();
  void set();
  void clear();
  int fd() const { return event_.fd(); }

 private:
  Socket event_;
};

// What a name or an address stands for.
struct Address {
  sockaddr_storage bytes = {};
  socklen_t length = 0;
  std::string text() const;  // "10.0.0.1:4000"
};
// Empty, with the reason in `why`, if the host is not known.
std::vector<Address> resolve(const Endpoint& endpoint, std::string& why);

// Connecting without waiting: the socket can be written once connect_error() is known, 0 if it is connected. Nothing,
// with the reason in `why`, if the address cannot be reached from here.
std::optional<Socket> begin_connect(const Address& address, std::string& why);
int connect_error(const Socket& socket);
// What the connections of a group have in common.
void prepare_for_messages(const Socket& socket);
// One attempt to connect; if it fails, returns nothing and puts the reason in `why`.
std::optional<Socket> try_connect(const Endpoint& endpoint, SteadyClock::time_point deadline,
                                  std::string& why);

// After this long a connection ends whose other machine has lost power or its network: both on accepted connections and
// on those of try_connect().
constexpr std::chrono::seconds kHostGoneAfter{10};
// For connections on which a receiver may be behind for longer than that: bytes that it has no room for do not end the
// connection (TCP_USER_TIMEOUT would, although the receiver's machine answers). While there are such bytes, only
// another connection shows that the machine is gone.
void expect_full_buffers(const Socket& socket);

// False when the peer is gone or the deadline passed.
bool send_all(const Socket& socket, const std::string& data, SteadyClock::time_point deadline);
bool receive_exactly(const Socket& socket, char* data, size_t bytes, SteadyClock::time_point deadline);

// This host's addresses that others might reach, IPv4 and IPv6, in the order of the interfaces; then the loopback address.
std::vector<std::string> own_addresses();
// Whether an interface of this host is in the same network as this address.
bool in_own_network(const std::string& address);
// The address of the interface with this name; throws BadInput that lists the existing ones.
std::string address_of_interface(const std::string& name);
bool is_loopback(const std::string& address);
// Whether other machines could reach a listener there. False for a name that does not resolve.
bool faces_network(const std::string& host);

// For poll(): the time until `deadline`, or until it is to be called again; -1 without a deadline.
int milliseconds_until(SteadyClock::time_point deadline);
// Waits until `fd` can be read (or written) or the deadline passes; false at the deadline.
bool wait_readable(int fd, SteadyClock::time_point deadline);
bool wait_writable(int fd, SteadyClock::time_point deadline);

}  // namespace gradwire
