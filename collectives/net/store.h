// The rendezvous store of a group of processes: a small server in rank 0's process, and each rank's
// connections to it.
//
// Five services:
//   store     keys and values, for exchanging addresses and the like before any transport exists
//   messages  short texts from any rank to rank 0; only rank 0 ever waits for one
//   alarm     notifies all ranks of the first failure that a rank reports, or of a process that vanishes
//   roll      after a failure: which ranks still answer, and each rank's state
//   notes     lines from any rank for rank 0's standard error
//
// Every call has a deadline; a server that does not answer is an error, never a hang.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collectives/net/contact.h"
#include "collectives/net/socket.h"
#include "runtime/threads/thread.h"
#include "runtime/util/error.h"

namespace gradwire {

// The content of one frame. On the wire: length of the rest, operation, id, length of the key, key, value.
struct StoreMessage {
  enum class Op : uint8_t {
    hello,    // key "command" or "watch", value "<rank> <world> <job>"
    set,      // reply ok
    get,      // reply ok with the value once it is set
    add,      // reply ok with the key's count
    fail,     // key: the failure; reply ok with the group's first failure
    roll,     // reply ok with a line per rank, see RollCall
    state,    // a rank's state, in answer to a failure; no reply
    bye,      // this rank leaves in an orderly way; reply ok
    message,  // value: a message to rank 0; no reply
    drop,     // removes this key and its count; no reply
    look,     // reply ok with the value, empty while the key is not set
    note,     // value: a line for rank 0's standard error; no reply
    ok,       // reply
    refuse,   // reply: value is the reason
    failed,   // from the server to watchers: the group failed, value is the reason
    closing   // from the server to watchers: orderly shutdown
  };
  Op op = Op::ok;
  uint32_t id = 0;
  std::string key, value;

  std::string encode() const;
  // Removes one frame from the front of `bytes` and returns it; nullopt if it is incomplete. Throws CommError
  // for malformed bytes.
  static std::optional<StoreMessage> decode(std::string& bytes);
};

// Returns one frame, from the front of `bytes` or received from `socket`. Returns nullopt at the deadline, or
// if the peer hangs up, which closes the socket. Throws CommError for malformed bytes.
std::optional<StoreMessage> receive_message(Socket& socket, std::string& bytes,
                                            SteadyClock::time_point deadline);

// The ranks that answered after a failure.
struct RollCall {
  enum class Presence : char { here = 'h', silent = 's', gone = 'g', left = 'l', never_came = 'n' };
  struct Entry {
    Presence presence = Presence::silent;
    std::string state;  // of a rank that answered
  };
  std::vector<Entry> ranks;

  std::string encode() const;
  static RollCall decode(const std::string& text);
  // Returns "no answer from rank 2; gone: rank 3": the ranks that did not answer; empty if all did.
  std::string absent() const;
};

// The server rejects this rank permanently; retrying does not help.
class StoreRefused : public CommError {
 public:
  using CommError::CommError;
};

// Thrown if the process that answers at all addresses of the server has another secret: it is the server of
// an earlier run or of another run.
class OtherSecret : public CommError {
 public:
  using CommError::CommError;
};

// Limits on what joined ranks may store at rank 0. A rank that exceeds them fails the group, with its name: a
// defective rank, or a process with the secret, must not exhaust the memory of rank 0's machine.
struct StoreLimits {
  size_t message_bytes_of_rank = size_t{64} << 20;  // not yet taken by rank 0
  size_t message_bytes;
  size_t key_bytes_of_rank = size_t{16} << 20;  // with their values and counts
  size_t key_bytes;
  size_t unanswered_of_rank = 1000;        // requests waiting for a key or a roll call
  size_t unread_bytes = size_t{64} << 20;  // not yet read by one connection
  size_t connections_of_rank = 16;
  size_t notes_of_rank = 500;  // printed; more are dropped without a failure

  explicit StoreLimits(int world)
      : message_bytes(std::max(size_t{256} << 20, static_cast<size_t>(world) * (size_t{32} << 20))),
        key_bytes(std::max(size_t{64} << 20, static_cast<size_t>(world) << 20)) {}
};

class StoreServer {
 public:
  // Serves `listener`. Rejects connections that do not prove that they know `key` (handshake.h), with a line
  // on stderr. Also rejects ranks of another job (job.h), with the reason.
  StoreServer(Socket listener, int world, const std::string& key, const std::string& job = "")
      : StoreServer(std::move(listener), world, key, job, StoreLimits(world)) {}
  // `invited`: connections to the processes that become the last ranks. Each sends something once it has
  // joined. If one hangs up before, the group fails at once.
  StoreServer(Socket listener, int world, const std::string& key, const std::string& job,
              const StoreLimits& limits, std::vector<Socket> invited = {});
  // Gives the other ranks time to make their last requests and leave, then announces the shutdown.
  ~StoreServer();
  int port() const { return port_; }

  // Waits for the oldest message of rank `from`. Returns nullopt at the deadline. Throws CommError if the
  // group fails. Any thread may call it.
  std::optional<std::string> take_message(int from, SteadyClock::time_point deadline);
  // Returns the reason why the group has failed; "" if it has not.
  std::string failure() const;

  // How long ranks have to answer after a failure, and how long the server stays up at the end.
  static constexpr std::chrono::milliseconds kRollTime{1000};
  static constexpr std::chrono::milliseconds kLinger{2000};
  // A rank that joins twice, while the group forms or this soon after, may belong to another run. It is then
  // unknown whose the first one was, so the group fails.
  static constexpr std::chrono::milliseconds kForming{3000};

 private:
  class Loop;
  class Messages;
  std::unique_ptr<Messages> messages_;
  std::unique_ptr<Loop> loop_;
  int port_ = 0;
  Thread thread_;
};

class StoreClient {
 public:
  using Milliseconds = std::chrono::milliseconds;

  // Makes two connections to the server and says hello on both. Throws CommError if the server cannot be
  // reached, rejects this rank or does not answer; OtherSecret if the process that answers does not know
  // `key`.
  StoreClient(const Contact& server, const std::string& key, int rank, int world,
              SteadyClock::time_point deadline, const std::string& job = "");
  // Leaves in an orderly way; immediately if the server has not answered the last request.
  ~StoreClient();

  void set(const std::string& key, const std::string& value);
  // Waits until the key is set. Throws CommError: "<what>: nothing after 500 ms".
  std::string get(const std::string& key, SteadyClock::time_point deadline, const std::string& what);
  // Returns the value, or "" while the key is not set. Waits for the server only.
  std::string look(const std::string& key);
  int64_t add(const std::string& key);
  // Removes a key that no rank will request again. Does not wait for an answer; a lost connection is detected
  // later.
  void drop(const std::string& key);
  // Sends a message to rank 0 without waiting for an answer. Throws CommError if the connection is lost.
  void send_message(const std::string& message);
  // Makes rank 0's process print a line: "gradwire: rank 2 <text>". Returns false if the connection is lost.
  // Any thread may call it at any time.
  bool note(const std::string& text);

  // When the group fails, calls `on_failure` with the cause on another thread, then sends the server the text
  // that `where` returns: this rank's state. At most once, maybe before watch() returns.
  void watch(std::function<void(const std::string& cause)> on_failure, std::function<std::string()> where);
  // Reports that this rank failed. Returns the group's first failure, which may be another one; nullopt if
  // the server does not answer.
  std::optional<std::string> report(const std::string& what);
  // Returns the roll call after a failure. If the server does not answer, rank 0, which runs it, counts as
  // silent, and the state of the others is unknown.
  RollCall roll_call();

  // The two ends of the connection to the server.
  std::string local_address() const { return command_.local_address(); }
  std::string peer_address() const { return command_.peer_address(); }

 private:
  StoreMessage request(StoreMessage message, SteadyClock::time_point deadline);
  void watch_loop();
  bool send_on_watch(const StoreMessage& message);

  int world_;
  std::mutex mutex_;          // guards command_ and next_id_
  std::mutex sending_watch_;  // held while sending on watch_
  Socket command_, watch_;
  WakeEvent wake_;
  std::string received_;             // received on command_, not decoded yet
  std::atomic<bool> silent_{false};  // the server did not answer in time
  uint32_t next_id_ = 1;
  std::function<void(const std::string&)> on_failure_;
  std::function<std::string()> where_;
  Thread watcher_;
};

}  // namespace gradwire
