// The rendezvous store of a group of processes: each rank's connections to a small server (store_server.h) in
// rank 0's process.
//
// Five services:
//   store     keys and values, for example addresses, which ranks exchange before they have a transport
//   messages  short texts from any rank to rank 0; only rank 0 waits for messages
//   alarm     notifies all ranks of the first failure that a rank reports, or of a process that ends
//   roll      after a failure: the ranks that still answer, and the state of each
//   notes     lines from any rank for rank 0's standard error
//
// Every call has a deadline. A call throws if the server does not answer.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/net/reach.h"
#include "collectives/net/socket.h"
#include "runtime/threads/thread.h"
#include "runtime/util/error.h"

namespace gradwire {

// The value of a hello frame.
struct StoreHello {
  int rank = 0, world = 1;
  std::string job = {};  // the rank's run (membership.h); "" if unknown

  std::string encode() const;
  static StoreHello decode(const std::string& text);  // throws CommError
};

// The presence of each rank after a failure.
struct RollCall {
  enum class Presence : char { here = 'h', silent = 's', gone = 'g', left = 'l', never_came = 'n' };
  struct Entry {
    Presence presence = Presence::silent;
    std::string state;  // the rank's state, if the rank answered
  };
  std::vector<Entry> ranks;

  bool any(Presence presence) const {
    return std::any_of(ranks.begin(), ranks.end(), [&](const Entry& e) { return e.presence == presence; });
  }
  std::string encode() const;
  static RollCall decode(const std::string& text);  // throws CommError
  // Returns the ranks that did not answer: "no answer from rank 2; gone: rank 3"; "" if all ranks answered.
  std::string absent() const;
  // Returns "; gone: rank 2; rank 3 is in call 17, ..., waiting for rank 1; ...": first the ranks that did
  // not answer, then the chain of waits from the rank `waited_for` (-1: none) to the rank that caused the
  // failure, then other ranks, all but `rank`. A state may end with kWaiting and a rank.
  std::string activities(int rank, int waited_for) const;
  static constexpr std::string_view kWaiting = ", waiting for rank ";
};

// Thrown if the server rejects this rank permanently; retrying does not help.
class StoreRefused : public CommError {
 public:
  using CommError::CommError;
};

// Thrown if a process with another secret answers at every address of the server: the server of an earlier
// run or of another run.
class OtherSecret : public CommError {
 public:
  using CommError::CommError;
};

// Limits on what joined ranks may store at rank 0. A rank that exceeds a limit fails the group, and the
// error names the rank: a defective rank, or a process with the secret, must not exhaust the memory of rank
// 0's machine.
struct StoreLimits {
  size_t message_bytes_of_rank = size_t{64} << 20;  // messages not yet taken by rank 0
  size_t message_bytes;
  size_t key_bytes_of_rank = size_t{16} << 20;  // bytes of keys, values and counts
  size_t key_bytes;
  size_t unanswered_of_rank = 1000;        // requests waiting for a key or a roll call
  size_t unread_bytes = size_t{64} << 20;  // bytes that one connection's peer has not read yet
  size_t connections_of_rank = 16;
  size_t notes_of_rank = 500;  // printed notes; further notes are dropped without a failure

  explicit StoreLimits(int world)
      : message_bytes(std::max(size_t{256} << 20, static_cast<size_t>(world) * (size_t{32} << 20))),
        key_bytes(std::max(size_t{64} << 20, static_cast<size_t>(world) << 20)) {}
};

// Returns the text with blanks in place of line ends.
std::string one_line(std::string text);

// How long ranks have to answer after a failure.
inline constexpr std::chrono::milliseconds kRollTime{1000};

class StoreClient {
 public:
  using Milliseconds = std::chrono::milliseconds;

  // Makes two connections to the server and sends a hello frame on each. Throws CommError if the server
  // cannot be reached, rejects this rank or does not answer. Throws OtherSecret if the process that answers
  // does not know `key`.
  StoreClient(const Contact& server, const std::string& key, int rank, int world,
              SteadyClock::time_point deadline, const std::string& job = "");
  // Announces an orderly departure and waits until the store has recorded it. Does not wait if the server has
  // not answered the last request.
  ~StoreClient();

  void set(const std::string& key, const std::string& value) {
    request({Frame::Op::set, 0, key, value}, SteadyClock::now() + kPromptly);
  }
  // Waits until the key is set, and returns the value. Throws CommError: "<what>: nothing after 500 ms".
  std::string get(const std::string& key, SteadyClock::time_point deadline, const std::string& what);
  // Returns the value, or "" while the key is not set. Waits only for the server's answer.
  std::string look(const std::string& key) {
    return request({Frame::Op::look, 0, key, ""}, SteadyClock::now() + kPromptly).value;
  }
  int64_t add(const std::string& key);
  // Removes a key that no rank will request again. Does not wait for an answer; a lost connection is detected
  // later.
  void drop(const std::string& key) {
    std::lock_guard lock(mutex_);
    send_frame(command_, {Frame::Op::drop, 0, key, ""}, SteadyClock::now() + kPromptly);
  }
  // Sends a message to rank 0 without waiting for an answer. Throws CommError if the connection is lost.
  void send_message(const std::string& message) {
    std::lock_guard lock(mutex_);
    const Frame frame{Frame::Op::message, 0, "", message};
    require<CommError>(send_frame(command_, frame, SteadyClock::now() + kPromptly), kGone);
  }
  // Makes rank 0's process print a line: "gradwire: rank 2 <text>". Returns false if the connection is lost.
  // Any thread may call it at any time.
  bool note(const std::string& text) { return send_on_watch({Frame::Op::note, 0, "", one_line(text)}); }

  // Starts a thread that waits for the group's failure. The thread calls `on_failure` with the cause, at most
  // once, maybe before watch() returns. The thread then sends the server the text that `where` returns: this
  // rank's state.
  void watch(std::function<void(const std::string& cause)> on_failure, std::function<std::string()> where);
  // Reports that this rank failed. Returns the group's first failure, which may be another rank's failure;
  // nullopt if the server does not answer.
  std::optional<std::string> report(const std::string& what);
  // Returns the roll call after a failure. If the server does not answer, rank 0, which runs the server,
  // counts as silent, and the state of the other ranks is unknown.
  RollCall roll_call();

  // Return the addresses of this end and of the server's end of the connection.
  std::string local_address() const { return command_.local_address(); }
  std::string peer_address() const { return command_.peer_address(); }

 private:
  Frame request(Frame frame, SteadyClock::time_point deadline);
  void watch_until_closed(const std::function<void(const std::string& cause)>& fail);
  bool send_on_watch(const Frame& frame) {
    std::lock_guard lock(sending_watch_);
    return send_frame(watch_, frame, SteadyClock::now() + kPromptly);
  }

  // Time limit for requests that the server answers at once. The limit is well below 5 s, within which every
  // rank must report an error.
  static constexpr Milliseconds kPromptly{2000};
  static constexpr const char kGone[] = "rank 0, which runs the store, is gone";

  int world_;
  std::mutex mutex_;          // guards command_ and next_id_
  std::mutex sending_watch_;  // held while sending on watch_
  Socket command_, watch_;
  WakeEvent wake_;
  // Bytes received on command_ and watch_, not decoded yet.
  std::string received_, watch_received_;
  std::atomic<bool> silent_{false};  // the server did not answer in time
  uint32_t next_id_ = 1;
  std::function<void(const std::string&)> on_failure_;
  std::function<std::string()> where_;
  Thread watcher_;
};

// How rank 0 publishes the location of its store to the other ranks.

// Functions that publish and read the location of rank 0's store.
struct RendezvousCallbacks {
  std::string address = {};  // where rank 0 listens; empty: all addresses of its host
  std::function<void(const std::string& text)> publish;
  std::function<std::string()> read;  // returns "" until the location is published
  // Rank 0's sockets to the last ranks (see StoreServer's `invited`). The caller owns the sockets.
  std::vector<int> invited = {};
  // Returns whether the group is known to have failed to form. For ranks that cannot reach rank 0.
  std::function<bool()> given_up = nullptr;
};

// The location of rank 0's store.
struct StoreLocation {
  Contact store = {};       // has no addresses while the location is unknown
  std::string secret = {};  // the rendezvous's secret, in addition to the run's secret

  std::string text() const;
  // Parses a published location. Returns an empty location if `text` is not a published location.
  static StoreLocation parse(const std::string& text);
};

// Returns the content of a rendezvous file; "" until the file is readable. Throws BadInput if `path` is not a
// regular file.
std::string read_rendezvous_file(const std::string& path);

// Writes a regular file that only this user can read (runtime/util/file.h). Throws BadInput if `path`
// cannot be such a file, Error if writing fails.
void write_private_file(const std::string& path, const std::string& text);

}  // namespace gradwire
