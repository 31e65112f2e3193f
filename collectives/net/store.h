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
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
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

  void set(const std::string& key, const std::string& value);
  // Waits until the key is set, and returns the value. Throws CommError: "<what>: nothing after 500 ms".
  std::string get(const std::string& key, SteadyClock::time_point deadline, const std::string& what);
  // Returns the value, or "" while the key is not set. Waits only for the server's answer.
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
  bool send_on_watch(const Frame& frame);

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

// The queue of messages from all ranks to rank 0 (store.h) that rank 0 has not taken yet.

// The store server's thread adds messages; rank 0's other threads take messages.
class MessageQueue {
 public:
  MessageQueue(int world, const StoreLimits& limits)
      : by_rank_(static_cast<size_t>(world)), bytes_of_(static_cast<size_t>(world)), limits_(limits) {}

  // Adds a message of rank `rank`. Returns false if the message exceeds the limits.
  bool add(int rank, std::string message) {
    std::lock_guard lock(mutex_);
    const size_t more = message.size() + kOverhead;
    size_t& of_rank = bytes_of_[static_cast<size_t>(rank)];
    if (of_rank + more > limits_.message_bytes_of_rank || bytes_ + more > limits_.message_bytes) return false;
    of_rank += more;
    bytes_ += more;
    by_rank_[static_cast<size_t>(rank)].push_back(std::move(message));
    changed_.notify_all();
    return true;
  }

  // Waits for the oldest message of rank `from`. Returns nullopt at the deadline. Throws CommError if the
  // group has failed and no message is left.
  std::optional<std::string> take(int from, SteadyClock::time_point deadline) {
    std::unique_lock lock(mutex_);
    auto& messages = by_rank_.at(static_cast<size_t>(from));
    wait_until(changed_, lock, deadline, [&] { return !messages.empty() || !failure_.empty(); });
    if (messages.empty() && !failure_.empty()) throw CommError(failure_);
    if (messages.empty()) return std::nullopt;
    std::string message = std::move(messages.front());
    messages.pop_front();
    bytes_of_[static_cast<size_t>(from)] -= message.size() + kOverhead;
    bytes_ -= message.size() + kOverhead;
    return message;
  }

  // Notifies waiting threads that the group has failed.
  void fail(const std::string& why) {
    std::lock_guard lock(mutex_);
    failure_ = why;
    changed_.notify_all();
  }
  void fail_without_memory() noexcept {
    std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = "no memory";  // short enough to need no allocation
    changed_.notify_all();
  }
  // Returns the reason why the group has failed; "" if it has not.
  std::string failure() {
    std::lock_guard lock(mutex_);
    return failure_;
  }

 private:
  static constexpr size_t kOverhead = 64;  // bookkeeping bytes counted for each message

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<std::string>> by_rank_;
  std::vector<size_t> bytes_of_;  // bytes of each rank's messages
  size_t bytes_ = 0;              // bytes of all ranks' messages
  const StoreLimits limits_;
  std::string failure_;
};

// The keys of a rendezvous store (store.h), and the number of bytes that each rank has stored.

// Thrown if a request of a rank exceeds the StoreLimits. The text completes a sentence whose subject is the
// rank.
class OverStoreLimit : public Error {
 public:
  using Error::Error;
};

class StoreKeys {
 public:
  StoreKeys(int world, const StoreLimits& limits) : limits_(limits), bytes_of_(static_cast<size_t>(world)) {}

  // Sets the key's value. Throws OverStoreLimit.
  void set(int rank, const std::string& key, const std::string& value) {
    remove(values_, key);
    const Owner owner = account(rank, key.size() + value.size());
    values_[key] = {value, owner};
  }
  // Adds one to the key's count. Returns the new count. Throws OverStoreLimit.
  int64_t add(int rank, const std::string& key) {
    auto found = counts_.find(key);
    if (found == counts_.end())
      found = counts_.emplace(key, Entry<int64_t>{0, account(rank, key.size())}).first;
    return ++found->second.content;
  }
  // Returns the key's value; null while the key is not set.
  const std::string* value(const std::string& key) const {
    const auto found = values_.find(key);
    return found == values_.end() ? nullptr : &found->second.content;
  }
  // Removes the key's value and count.
  void drop(const std::string& key) {
    remove(values_, key);
    remove(counts_, key);
  }

 private:
  static constexpr size_t kOverhead = 128;  // bookkeeping bytes counted for each key

  struct Owner {
    int rank = 0;
    size_t bytes = 0;
  };
  template <typename T>
  struct Entry {
    T content = {};
    Owner owner;  // the first rank that set the key or added to its count
  };

  Owner account(int rank, size_t content) {
    const size_t bytes = content + kOverhead;
    size_t& of_rank = bytes_of_[static_cast<size_t>(rank)];
    if (of_rank + bytes > limits_.key_bytes_of_rank || bytes_ + bytes > limits_.key_bytes) {
      throw OverStoreLimit(
          "leaves more with rank 0 than it has room for: {} bytes in addition to its {} bytes and "
          "the {} bytes of all ranks",
          bytes, of_rank, bytes_);
    }
    of_rank += bytes;
    bytes_ += bytes;
    return {rank, bytes};
  }

  template <typename T>
  void remove(std::map<std::string, Entry<T>>& entries, const std::string& key) {
    const auto found = entries.find(key);
    if (found == entries.end()) return;
    bytes_of_[static_cast<size_t>(found->second.owner.rank)] -= found->second.owner.bytes;
    bytes_ -= found->second.owner.bytes;
    entries.erase(found);
  }

  const StoreLimits limits_;
  std::map<std::string, Entry<std::string>> values_;
  std::map<std::string, Entry<int64_t>> counts_;
  std::vector<size_t> bytes_of_;  // bytes stored by each rank
  size_t bytes_ = 0;              // bytes stored by all ranks
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

// Returns whether `text` has the form of a location published by rank 0.
bool is_store_location(const std::string& text);

// Returns callbacks that publish and read the location in the file `path`.
RendezvousCallbacks file_callbacks(const std::string& path);
// Removes the rendezvous file, unless a later group has reused the file name. Rank 0 calls it when rank 0
// leaves. `secret`: the run's secret. `key`: the group's key.
void remove_rendezvous_file(const std::string& path, const std::string& secret,
                            const std::string& key) noexcept;

// Return the path in file:///path and the endpoint in tcp://host:port. Throw BadInput if `rendezvous` is
// invalid.
std::string path_of_rendezvous(const std::string& rendezvous);
Endpoint endpoint_of_rendezvous(const std::string& rendezvous);

// Writes a regular file that only this user can read (runtime/util/file.h). Throws BadInput if `path`
// cannot be such a file, Error if writing fails.
void write_private_file(const std::string& path, const std::string& text);

}  // namespace gradwire
