// Control messages between the processes of one run. Sockets carry Frames. The value of a Frame, or of a key
// of the store, is often a Message. The processes of a run have the same version of Gradwire, so neither
// encoding contains a version.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "collectives/net/socket.h"

namespace gradwire {

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
