// TCP sockets with deadlines, as far as rendezvous needs them: every call that waits returns at its deadline.
// Deadlines use RunningClock, which pauses while this process is stopped.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "runtime/threads/running_clock.h"
#include "runtime/util/standard_descriptors.h"

namespace gradwire {

using SteadyClock = RunningClock;

// Owns a file descriptor above 2, so never standard input, output or error.
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

  // Return addresses as numbers, e.g. "10.0.0.1"; empty if not connected.
  std::string local_address() const;
  std::string peer_address() const;
  // Returns whether the peer has closed the connection or is gone, even if bytes are still unread.
  bool hung_up() const;

 private:
  int fd_ = -1;
};

struct Endpoint {
  std::string host;
  int port = 0;
  std::string text() const;
};

// Listens on the address named by `host`; "": on all addresses, IPv4 and IPv6. Port 0: any free port. Throws
// CommError, with the reason, on failure.
Socket listen_on(const Endpoint& endpoint);
// Both 0: any free port.
struct PortRange {
  int first = 0, last = 0;
};
// Throws BadInput that names `what` unless 1 <= first <= last <= 65535, or both ports are 0.
void check_ports(const std::string& what, const PortRange& ports);
// Parses "20000-20100", or one port. Throws BadInput that names `what`.
PortRange parse_ports(const std::string& what, const std::string& text);
// Listens on the first free port of the range, at `address`. Throws CommError that names the range if there
// is none.
Socket listen_within(const PortRange& ports, const std::string& address);
int local_port(const Socket& socket);
// Returns nullopt if no connection is pending or the system refuses one: see errno.
std::optional<Socket> accept_from(const Socket& listener);

// Accepts connections. Pauses briefly after the system has refused a descriptor or memory for a connection.
// (The connection then stays pending, so that poll() on the listener would return at once.)
class Acceptor {
 public:
  // `listener` must outlive this.
  explicit Acceptor(const Socket& listener) : listener_(listener) {}
  // Returns the descriptor to poll: the listener, or -1 during a pause.
  int fd() const { return resting() ? -1 : listener_.fd(); }
  // Returns the timeout of a poll(): `at_most`, or less during a pause.
  std::chrono::milliseconds patience(std::chrono::milliseconds at_most) const;
  // Returns nullopt if no connection is pending or none can be accepted.
  std::optional<Socket> accept();
  // Returns the reason if the system has refused connections for longer than kGrace, otherwise "".
  std::string refused() const;

  static constexpr std::chrono::milliseconds kGrace{2000}, kRest{100};

 private:
  bool resting() const { return SteadyClock::now() < rests_until_; }

  const Socket& listener_;
  std::string why_;  // "" since the last success
  SteadyClock::time_point since_ = {}, rests_until_ = {};
};

// Wakes a poll() of another thread.
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

// The resolved address of a name or an address text.
struct Address {
  sockaddr_storage bytes = {};
  socklen_t length = 0;
  std::string text() const;  // "10.0.0.1:4000"
};
// Returns an empty list, with the reason in `why`, if the host is unknown.
std::vector<Address> resolve(const Endpoint& endpoint, std::string& why);

// Begins to connect, without waiting. The socket becomes writable once connect_error() is known; 0 means
// connected. Returns nullopt, with the reason in `why`, if this host cannot reach the address.
std::optional<Socket> begin_connect(const Address& address, std::string& why);
int connect_error(const Socket& socket);
// Settings shared by the connections of a group.
void prepare_for_messages(const Socket& socket);
// Makes one attempt to connect. Returns nullopt, with the reason in `why`, on failure.
std::optional<Socket> try_connect(const Endpoint& endpoint, SteadyClock::time_point deadline,
                                  std::string& why);

// Time after which a connection ends if the other machine has lost power or its network. Applies to accepted
// connections and to connections of try_connect().
constexpr std::chrono::seconds kHostGoneAfter{10};
// For connections whose receiver may be busy for longer than that: unread bytes at the receiver do not end
// the connection. (TCP_USER_TIMEOUT would end it, although the receiver's machine answers.) While such bytes
// are pending, only another connection shows that the machine is gone.
void expect_full_buffers(const Socket& socket);

// Return false if the peer is gone or the deadline has passed.
bool send_all(const Socket& socket, const std::string& data, SteadyClock::time_point deadline);
bool receive_exactly(const Socket& socket, char* data, size_t bytes, SteadyClock::time_point deadline);

// Returns this host's addresses that other hosts might reach, IPv4 and IPv6, in the order of the interfaces,
// and then the loopback address.
std::vector<std::string> own_addresses();
// Returns whether an interface of this host is in the same network as this address.
bool in_own_network(const std::string& address);
// Returns the address of the interface with this name. Throws BadInput that lists the existing interfaces.
std::string address_of_interface(const std::string& name);
// Throws the same error, prefixed with `what`.
void check_interface(const std::string& what, const std::string& name);
bool is_loopback(const std::string& address);
// Returns whether other machines could reach a listener there; false for a name that does not resolve.
bool faces_network(const std::string& host);

// Returns a timeout for poll(): the time until `deadline`, or until poll() must be called again; -1 without a
// deadline.
int milliseconds_until(SteadyClock::time_point deadline);
// Wait until `fd` can be read (or written). Return false at the deadline.
bool wait_readable(int fd, SteadyClock::time_point deadline);
bool wait_writable(int fd, SteadyClock::time_point deadline);

}  // namespace gradwire
