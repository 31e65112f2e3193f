// TCP sockets with deadlines, just enough for rendezvous: every call that waits returns at its deadline. Deadlines are on
// RunningClock, which stands still while this process is stopped.
#pragma once

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

// Listens on the address that `host` names; "" is all of them. Port 0: any free port. Throws CommError with the
// reason if it cannot.
Socket listen_on(const Endpoint& endpoint);
// Both 0: any free port.
struct PortRange {
  int first = 0, last = 0;
};
// On the first free port of the range, at `address`. Throws CommError that names the range if there is none.
Socket listen_within(const PortRange& ports, const std::string& address);
int local_port(const Socket& socket);
std::optional<Socket> accept_from(const Socket& listener);  // empty when no connection is pending

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

// This machine's addresses that other machines might reach, followed by the loopback address.
std::vector<std::string> own_addresses();
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
