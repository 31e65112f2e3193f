// The meeting place of a group of processes: a small server in rank 0's process, and each rank's connections
// to it.
//
// Four services:
//   store     keys and values, for exchanging addresses and the like before any transport exists
//   messages  short texts from any rank to rank 0, which nobody waits for but rank 0
//   alarm     the first failure reported by any rank, or a process that vanishes, is told to all ranks
//   roll      after a failure: who still answers, and where each rank stands
//
// Every call has a deadline; a server that does not answer is an error, never a hang.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "collectives/rendezvous/socket.h"
#include "runtime/error.h"

namespace gradwire {

// What one frame carries. On the wire: length of the rest, operation, id, length of the key, key, value.
struct StoreMessage {
  enum class Op : uint8_t {
    hello,    // key "command" or "watch", value "<token> <rank> <world>"
    set,      // reply ok
    get,      // reply ok with the value once it is there
    add,      // reply ok with how often this key was added to
    fail,     // key: what happened; reply ok with the first failure of the group
    roll,     // reply ok with a line per rank, see RollCall
    state,    // where a rank stands, in answer to a failure; no reply
    bye,      // this rank leaves in peace; reply ok
    message,  // value: a message of this rank's for rank 0; no reply
    ok,       // reply
    refuse,   // reply: value says why
    failed,   // from the server to watchers: the group failed, value says why
    closing   // from the server to watchers: it leaves in peace
  };
  Op op = Op::ok;
  uint32_t id = 0;
  std::string key, value;

  std::string encode() const;
  // Takes one frame off the front of `bytes`; nothing when there is no whole one yet. Throws CommError on
  // garbage.
  static std::optional<StoreMessage> decode(std::string& bytes);
};

// Who answered after a failure, by rank.
struct RollCall {
  enum class Presence : char { here = 'h', silent = 's', gone = 'g', left = 'l', never_came = 'n' };
  struct Entry {
    Presence presence = Presence::silent;
    std::string state;  // of ranks that are here
  };
  std::vector<Entry> ranks;

  std::string encode() const;
  static RollCall decode(const std::string& text);
  // "no answer from rank 2; rank 3 is gone", leaving out who is here; empty when all are.
  std::string absent() const;
};

// The server knows this rank or its group and will not have it; trying again will not help.
class StoreRefused : public CommError {
 public:
  using CommError::CommError;
};

class StoreServer {
 public:
  // Listens; throws CommError when it cannot. `token` keeps strangers and leftovers of earlier runs out.
  StoreServer(const Endpoint& endpoint, int world, std::string token);
  // Gives the others time to leave first, for what they may still want to ask; then tells them that the
  // server leaves.
  ~StoreServer();
  int port() const { return port_; }

  // The oldest message of rank `from`; waits for one. Any thread may call it. Nothing at the deadline; throws
  // CommError when the group fails.
  std::optional<std::string> take_message(int from, SteadyClock::time_point deadline);

  static constexpr std::chrono::milliseconds kRollTime{
      1000};                                                 // how long ranks have to answer after a failure
  static constexpr std::chrono::milliseconds kLinger{2000};  // how long the server stays for the others

 private:
  class Loop;
  class Messages;
  std::unique_ptr<Messages> messages_;
  std::unique_ptr<Loop> loop_;
  int port_ = 0;
  std::thread thread_;
};

class StoreClient {
 public:
  using Milliseconds = std::chrono::milliseconds;

  // Takes over two fresh connections to the server and says hello on both. Throws CommError when the server
  // refuses or does not answer.
  StoreClient(Socket command, Socket watch, const std::string& token, int rank, int world,
              SteadyClock::time_point deadline);
  // Leaves in peace.
  ~StoreClient();

  void set(const std::string& key, const std::string& value);
  // Waits until the key is there. Throws CommError: "<what>: nothing after 500 ms".
  std::string get(const std::string& key, SteadyClock::time_point deadline, const std::string& what);
  int64_t add(const std::string& key);
  // Leaves a message for rank 0, without waiting for an answer. Throws CommError when the connection is lost.
  void send_message(const std::string& message);

  // Calls `on_failure` with the cause, from a thread of its own, when the group fails; then tells the server
  // `where` this rank stands. At most once, and possibly before this returns.
  void watch(std::function<void(const std::string& cause)> on_failure, std::function<std::string()> where);
  // Reports that this rank failed; returns the group's first failure, which may be another one, or nothing
  // when the server does not answer.
  std::optional<std::string> report(const std::string& what);
  // After a failure. When the server, which is rank 0's, does not answer, rank 0 is silent and nothing is
  // known of the others.
  RollCall roll_call();

  // The two ends of the connection to the server.
  std::string local_address() const { return command_.local_address(); }
  std::string peer_address() const { return command_.peer_address(); }

 private:
  StoreMessage request(StoreMessage message, SteadyClock::time_point deadline);
  void watch_loop();

  int rank_, world_;
  std::mutex mutex_;  // of command_ and next_id_
  Socket command_, watch_, wake_;
  std::string received_;  // on command_, not yet decoded
  uint32_t next_id_ = 1;
  std::function<void(const std::string&)> on_failure_;
  std::function<std::string()> where_;
  std::thread watcher_;
};

}  // namespace gradwire
