// The rendezvous store of a group of processes: a small server in rank 0's process, and each rank's
// connections to it.
//
// Five services:
//   store     keys and values, for exchanging addresses and the like before any transport exists
//   messages  short texts from any rank to rank 0; only rank 0 ever waits for one
//   alarm     tells all ranks of the first failure that any rank reports, or of a process that vanishes
//   roll      after a failure: who still answers, and what each rank is doing
//   notes     lines of any rank for rank 0's standard error
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

#include "collectives/rendezvous/contact.h"
#include "collectives/rendezvous/socket.h"
#include "runtime/error.h"
#include "runtime/thread.h"

namespace gradwire {

// The content of one frame. On the wire: length of the rest, operation, id, length of the key, key, value.
struct StoreMessage {
  enum class Op : uint8_t {
    hello,    // key "command" or "watch", value "<rank> <world> <job>"
    set,      // reply ok
    get,      // reply ok with the value once it is set
    add,      // reply ok with how often this key has been added to
    fail,     // key: what happened; reply ok with the first failure of the group
    roll,     // reply ok with a line per rank, see RollCall
    state,    // what a rank is doing, in answer to a failure; no reply
    bye,      // this rank leaves in an orderly way; reply ok
    message,  // value: a message to rank 0; no reply
    drop,     // forgets this key, and its count; no reply
    look,     // reply ok with the value, empty as long as the key is not set
    note,     // value: a line for rank 0's standard error; no reply
    ok,       // reply
    refuse,   // reply: value says why
    failed,   // from the server to watchers: the group failed, value says why
    closing   // from the server to watchers: orderly shutdown
  };
  Op op = Op::ok;
  uint32_t id = 0;
  std::string key, value;

  std::string encode() const;
  // Takes one frame off the front of `bytes`; nothing if it is not complete yet. Throws CommError on garbage.
  static std::optional<StoreMessage> decode(std::string& bytes);
};

// One frame, at the front of `bytes` or still to come on `socket`; nothing at the deadline, or when the peer hangs up,
// which closes the socket. Throws CommError on garbage.
std::optional<StoreMessage> receive_message(Socket& socket, std::string& bytes,
                                            SteadyClock::time_point deadline);

// Who answered after a failure, by rank.
struct RollCall {
  enum class Presence : char { here = 'h', silent = 's', gone = 'g', left = 'l', never_came = 'n' };
  struct Entry {
    Presence presence = Presence::silent;
    std::string state;  // of ranks that answered
  };
  std::vector<Entry> ranks;

  std::string encode() const;
  static RollCall decode(const std::string& text);
  // "no answer from rank 2; gone: rank 3": the ranks that did not answer; empty if all did.
  std::string absent() const;
};

// The server rejects this rank for good; trying again will not help.
class StoreRefused : public CommError {
 public:
  using CommError::CommError;
};

// Thrown when the process that answers at all addresses of the server has another secret: it is the server of
// an earlier run or of another run.
class OtherSecret : public CommError {
 public:
  using CommError::CommError;
};

// What ranks that have joined may leave with rank 0. Whoever leaves more fails the group, by name: a defect
// of a rank, or somebody with the secret, should not use up the memory of rank 0's machine.
struct StoreLimits {
  size_t message_bytes_of_rank = size_t{64} << 20;  // that rank 0 has not taken
  size_t message_bytes;
  size_t key_bytes_of_rank = size_t{16} << 20;  // with their values and counts
  size_t key_bytes;
  size_t unanswered_of_rank = 1000;        // requests that wait for a key or a roll call
  size_t unread_bytes = size_t{64} << 20;  // that one connection has not taken
  size_t connections_of_rank = 16;
  size_t notes_of_rank = 500;  // that are printed; more are no failure

  explicit StoreLimits(int world)
      : message_bytes(std::max(size_t{256} << 20, static_cast<size_t>(world) * (size_t{32} << 20))),
        key_bytes(std::max(size_t{64} << 20, static_cast<size_t>(world) << 20)) {}
};

class StoreServer {
 public:
  // Serves `listener`. Who does not prove that it knows `key` (handshake.h) is turned away,
  // with a line on stderr. So are ranks of another job (job.h), and they hear why.
  StoreServer(Socket listener, int world, const std::string& key, const std::string& job = "")
      : StoreServer(std::move(listener), world, key, job, StoreLimits(world)) {}
  //
  // `invited`: connections to the processes that are to become the last ranks, each of which says something, whatever
  // it is, once it has joined. If one hangs up before, the group fails at once.
  StoreServer(Socket listener, int world, const std::string& key, const std::string& job,
              const StoreLimits& limits, std::vector<Socket> invited = {});
  // Gives the other ranks time to make their last requests and leave, then announces the shutdown.
  ~StoreServer();
  int port() const { return port_; }

  // Waits for the oldest message of rank `from`. Any thread may call it. Nothing at the deadline; throws
  // CommError if the group fails.
  std::optional<std::string> take_message(int from, SteadyClock::time_point deadline);
  // Returns the reason why the group has failed; "" if it has not.
  std::string failure() const;

  // How long ranks have to answer after a failure, and how long the server stays up at the end.
  static constexpr std::chrono::milliseconds kRollTime{1000};
  static constexpr std::chrono::milliseconds kLinger{2000};
  // A rank that comes twice, while the group forms or so soon after, may belong to another run: then nobody knows whose
  // the first one was, and the group fails.
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

  // Makes two connections to the server and says hello on both. Throws CommError if the server cannot be reached,
  // refuses, or does not answer; OtherSecret if the process that answers does not know `key`.
  StoreClient(const Contact& server, const std::string& key, int rank, int world,
              SteadyClock::time_point deadline, const std::string& job = "");
  // Leaves in an orderly way; at once, if the server has not answered the last request.
  ~StoreClient();

  void set(const std::string& key, const std::string& value);
  // Waits until the key is set. Throws CommError: "<what>: nothing after 500 ms".
  std::string get(const std::string& key, SteadyClock::time_point deadline, const std::string& what);
  // The value, or "" as long as the key is not set. Waits for the server only.
  std::string look(const std::string& key);
  int64_t add(const std::string& key);
  // Forgets the key, which no rank will ask for again. Without waiting for an answer; a lost connection shows
  // later.
  void drop(const std::string& key);
  // Sends a message to rank 0 without waiting for an answer. Throws CommError if the connection is lost.
  void send_message(const std::string& message);
  // Has rank 0's process print a line: "gradwire: rank 2 <text>". Any thread may call it, whatever the others wait for.
  // False if the connection is lost.
  bool note(const std::string& text);

  // When the group fails, calls `on_failure` with the cause from a thread of its own, then sends the server
  // the text that `where` returns: what this rank is doing. At most once, maybe before watch() returns.
  void watch(std::function<void(const std::string& cause)> on_failure, std::function<std::string()> where);
  // Reports that this rank failed; returns the group's first failure, which may be another one, or nothing if
  // the server does not answer.
  std::optional<std::string> report(const std::string& what);
  // After a failure. If the server does not answer, rank 0, which runs it, counts as silent and nothing is
  // known of the others.
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
  std::mutex sending_watch_;  // held while something is sent on watch_
  Socket command_, watch_;
  WakeEvent wake_;
  std::string received_;             // on command_, not yet decoded
  std::atomic<bool> silent_{false};  // the server did not answer when it had to
  uint32_t next_id_ = 1;
  std::function<void(const std::string&)> on_failure_;
  std::function<std::string()> where_;
  Thread watcher_;
};

}  // namespace gradwire
