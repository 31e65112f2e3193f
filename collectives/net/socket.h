// TCP sockets with deadlines: every call that waits returns at its deadline. Deadlines use RunningClock,
// which pauses while this process is stopped.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/threads/running_clock.h"
#include "runtime/util/file.h"

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

// Control messages between the processes of one run. Sockets carry Frames. The value of a Frame, or of a key
// of the store, is often a Message. The processes of a run have the same version of Gradwire, so neither
// encoding contains a version.

// A text of fields, each a key with a value. A key may repeat: its values form a list. The encoding of a
// field is the length of the key (4 bytes), the length of the value (4 bytes), the key and the value.
class Message {
 public:
  using Fields = std::vector<std::pair<std::string, std::string>>;

  Message& add(std::string_view key, std::string_view value);
  Message& add(std::string_view key, int64_t value);

  // Return the first value of a key, or all values of the key. text() and number() throw CommError if the key
  // is missing. number() and numbers() throw CommError unless the value is a number from `least` to `most`.
  const std::string& text(std::string_view key) const;
  int number(std::string_view key, int least, int most = std::numeric_limits<int>::max()) const;
  std::vector<std::string> texts(std::string_view key) const;
  std::vector<int> numbers(std::string_view key, int least, int most) const;
  const Fields& fields() const { return fields_; }

  std::string encode() const;
  // Decodes an encoded message. Throws CommError if `bytes` is not an encoded message.
  static Message decode(std::string_view bytes);

 private:
  Fields fields_;
};

// One unit of a connection. The encoding is the length of the following bytes, the operation, the id, the
// length of the key, the key and the value. Integers are little-endian.
struct Frame {
  enum class Op : uint8_t {
    // Operations from a rank to the store.
    hello,    // key "command" or "watch", value StoreHello; reply ok, again or refuse
    set,      // reply ok
    get,      // reply ok with the value once it is set
    add,      // reply ok with the key's count
    fail,     // key: the failure; reply ok with the group's first failure
    roll,     // reply ok with a RollCall
    state,    // value: the sender's state, in answer to `failed`; no reply
    bye,      // announces the sender's orderly departure; no reply
    message,  // value: a message to rank 0; no reply
    drop,     // removes this key and its count; no reply
    look,     // reply ok with the value, empty while the key is not set
    note,     // value: a line for rank 0's standard error; no reply
    // Operations from the store to a rank.
    ok,       // reply to a successful request
    refuse,   // reply that rejects a request; value: the reason
    again,    // reply to hello: rejects the rank for now; value: the reason
    failed,   // value: why the group has failed; only to watching connections
    closing,  // announces an orderly shutdown; only to watching connections
    link,     // from a rank to a rank's TcpLinks; value: the rank
    // Operations from a rank to a rank of its quorum. Value: the caller's rank, and the number and name of
    // the caller's group.
    call,  // requests the survivors; the reply follows once they are known
    ask,   // asks whether the process is alive; reply alive
    // Replies of a rank to `call` and `ask`.
    alive,
    survivors,  // value: Quorum::NextGroup
    retry,      // another rank leads, or this rank has not formed the caller's group yet
    missed,     // the group continued without the caller; value: the error text
    // Operations from a joiner to a rank.
    request,  // value: the joiner's contact and its description
    present,  // reply to `check`
    joined,   // the sender has entered the new group
    // Operations from a rank to a joiner.
    wait,      // keeps the joiner waiting; sent once per second
    check,     // asks whether the joiner still answers
    redirect,  // value: the contact of the rank to ask
    rejected,  // value: the reason
    admitted,  // value: the new group; see Admitted
    last = admitted
  };
  Op op = Op::ok;
  uint32_t id = 0;
  std::string key = {}, value = {};

  std::string encode() const;
  // Removes one frame from the front of `bytes` and returns the frame; nullopt if the frame is incomplete.
  // Throws CommError for malformed bytes.
  static std::optional<Frame> decode(std::string& bytes);
  // Returns how many bytes to read after decode() has returned nullopt. The number never includes a byte
  // after the frame.
  static size_t missing(const std::string& bytes);
};

// Sends a frame. Returns false if the peer is gone or the deadline has passed.
bool send_frame(const Socket& socket, const Frame& frame, SteadyClock::time_point deadline);
// Returns one frame, from the front of `bytes` or received from `socket`. Returns nullopt at the deadline, or
// if the peer hangs up, which closes the socket. Throws CommError for malformed bytes.
std::optional<Frame> receive_frame(Socket& socket, std::string& bytes, SteadyClock::time_point deadline);

}  // namespace gradwire
