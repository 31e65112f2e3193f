// TCP sockets with deadlines: every call that waits returns at its deadline. Deadlines use RunningClock,
// which pauses while this process is stopped.
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

// Owns a file descriptor above 2, so the descriptor is never standard input, output or error. In a fork it
// refers to nothing, so that connections end with their process; the fork cannot use its number otherwise.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd);
  Socket(Socket&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Socket& operator=(Socket&& other) noexcept;
  ~Socket() { close(); }
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void close();

  // Return the addresses of both ends as numbers, e.g. "10.0.0.1"; "" if not connected.
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

// An event that wakes a poll() of another thread.
class WakeEvent {
 public:
  // Creates the event. Throws OutOfResources if the system refuses a descriptor.
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
  std::string host() const;  // e.g. "10.0.0.1"; "" if unknown
  int port() const;
  std::string text() const;  // e.g. "10.0.0.1:4000"
};
// Returns the addresses to connect to, or to listen at. An empty host with `listens` means all addresses of
// this host. Returns an empty list, with the reason in `why`, if the host is unknown.
std::vector<Address> resolve(const Endpoint& endpoint, std::string& why, bool listens = false);

// Begins to connect, without waiting. The socket becomes writable once connect_error() is known; the error 0
// means connected. Returns nullopt, with the reason in `why`, if this host cannot reach the address.
std::optional<Socket> begin_connect(const Address& address, std::string& why);
int connect_error(const Socket& socket);
// Sets the socket options that connections between ranks need.
void prepare_for_messages(const Socket& socket);

// Time after which a connection ends if the other machine has lost power or its network. Applies to accepted
// connections and to connections of begin_connect().
constexpr std::chrono::seconds kHostGoneAfter{10};
// Makes the connection tolerate a receiver that is busy for longer than kHostGoneAfter: unread bytes at the
// receiver do not end the connection. (TCP_USER_TIMEOUT would end the connection, although the receiver's
// machine answers.) While unread bytes are pending, only another connection shows that the machine is gone.
void expect_full_buffers(const Socket& socket);

// Sends all bytes. Returns false if the peer is gone or the deadline has passed.
bool send_all(const Socket& socket, const std::string& data, SteadyClock::time_point deadline);

bool is_loopback(const std::string& address);
// Returns whether other machines could reach a listener at the address `host`; false for a name that does not
// resolve.
bool faces_network(const std::string& host);

// Returns a timeout for poll(): the time until `deadline`, or less if the caller must then call poll() again;
// -1 without a deadline.
int milliseconds_until(SteadyClock::time_point deadline);
// Block until `fd` can be read (or written). Return false at the deadline.
bool wait_readable(int fd, SteadyClock::time_point deadline);
bool wait_writable(int fd, SteadyClock::time_point deadline);

}  // namespace gradwire
