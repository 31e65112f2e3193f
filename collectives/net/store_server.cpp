#include "collectives/net/store_server.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "collectives/net/handshake.h"
#include "collectives/net/listener.h"
#include "collectives/net/membership.h"
#include "collectives/net/socket.h"
#include "collectives/net/store.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"

namespace gradwire {

using Op = Frame::Op;
using Presence = RollCall::Presence;

namespace {

// Thrown if a request of a rank exceeds the StoreLimits. The text completes a sentence whose subject is the
// rank.
class OverStoreLimit : public Error {
 public:
  using Error::Error;
};

}  // namespace

// The server's thread: one poll loop without blocking calls. Only this thread uses the members, except
// stopping_, wake_ and the members that mutex_ guards. The members form the state of one protocol, whose
// services share the peers and the failure.
struct StoreServer::Loop {
  Loop(Socket listener, int world, const std::string& key, const std::string& job, const StoreLimits& limits,
       std::vector<Socket> invited)
      : limits_(limits),
        world_(world),
        job_(job),
        listener_(std::move(listener), {key, kStorePurpose}),
        invited_(std::move(invited)),
        messages_(static_cast<size_t>(world)),
        usage_(static_cast<size_t>(world)) {
    roll_.ranks.resize(static_cast<size_t>(world), {Presence::never_came, ""});
  }

  void run() {
    try {
      serve_until_stopped();
    } catch (const std::exception&) {  // no memory: the ranks detect that the store is gone
      {
        std::lock_guard lock(mutex_);
        if (failure_.empty()) failure_ = "no memory";  // short enough to need no allocation
        changed_.notify_all();
      }
      peers_.clear();
      listener_.close();
    }
  }

  struct Peer {
    Socket socket;
    int rank = 0;
    bool watches = false;
    std::string in = {}, out = {};  // received bytes not decoded yet; bytes to send
    bool leaving = false;           // the peer has sent `bye`
    bool dead = false;
  };
  // A key with its value or its count, and the first rank that set it.
  struct Key {
    std::string value = {};
    int64_t count = 0;
    int rank = 0;
    size_t bytes = 0;
  };
  // What a rank has stored, and how many of its notes are printed.
  struct Usage {
    size_t key_bytes = 0, message_bytes = 0, notes = 0;
  };
  // Bookkeeping bytes counted for each key and each message.
  static constexpr size_t kKeyOverhead = 128, kMessageOverhead = 64;
  // A request for a key that is not set yet.
  struct Waiting {
    Peer* peer;
    uint32_t id;
    std::string key;
  };

  void serve_until_stopped() {
    while (true) {
      if (stopping_ && !closing_at_) closing_at_ = SteadyClock::now() + StoreServer::kLinger;
      // All remaining watching peers are rank 0 or ranks that did not answer the roll call.
      const bool only_rank_0_left = std::none_of(peers_.begin(), peers_.end(), [&](const auto& p) {
        return p->watches && p->rank != 0 &&
               !(roll_is_over() && roll_.ranks[p->rank].presence == Presence::silent);
      });
      if (closing_at_ && (SteadyClock::now() >= *closing_at_ || only_rank_0_left)) {
        for (auto& peer : peers_) {
          if (peer->watches && failure_.empty()) send(*peer, {Op::closing, 0, "", ""});
        }
        return;
      }
      std::vector<pollfd> entries = {{wake_.fd(), POLLIN, 0}};
      for (const auto& peer : peers_) {
        entries.push_back(
            {peer->socket.fd(), static_cast<short>(peer->out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
      }
      const size_t invited_at = entries.size();
      // A closed socket has the descriptor -1, which poll() ignores.
      for (const Socket& socket : invited_) entries.push_back({socket.fd(), POLLIN, 0});
      listener_.add_entries(entries);
      auto next = SteadyClock::now() + listener_.tick();
      if (closing_at_) next = std::min(next, *closing_at_);
      if (roll_due_at_ && !roll_callers_.empty()) next = std::min(next, *roll_due_at_);
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - SteadyClock::now());
      poll(entries.data(), entries.size(), static_cast<int>(std::max<int64_t>(0, left.count())));
      if (entries[0].revents != 0) wake_.clear();
      for (size_t i = 0; i < invited_.size(); ++i) {
        if (entries[invited_at + i].revents != 0) check_invited(i);
      }
      for (size_t i = 0; i + 1 < invited_at; ++i) {
        if (entries[i + 1].revents != 0) serve(*peers_[i]);
      }
      for (auto& caller : listener_.advance(entries, static_cast<size_t>(world_))) hello(std::move(caller));
      for (const std::string& line : listener_.take_log()) print(0, line);
      // After the group has formed, the server needs no other connection; new connections are rejected or
      // wait.
      if (!formed_at_ && !listener_.refused().empty()) fail("rank 0 " + listener_.refused());
      {
        std::lock_guard lock(mutex_);
        refusal_ = listener_.refusal();
      }
      remove_dead_peers();
      if (roll_due_at_ && !roll_is_over() && roll_.any(Presence::silent)) continue;
      for (const Waiting& caller : roll_callers_) reply(*caller.peer, caller.id, roll_.encode());
      roll_callers_.clear();
    }
  }

  // Handles an invited process that has joined or died.
  void check_invited(size_t i) {
    char byte;
    const ssize_t n = recv(invited_[i].fd(), &byte, 1, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    invited_[i].close();
    if (n > 0) return;
    const size_t rank = static_cast<size_t>(world_) - invited_.size() + i;
    fail(fmt::format("the process that was to become rank {} is gone", rank));
  }

  // ---- Sending and receiving

  void send(Peer& peer, const Frame& frame) {
    peer.out += frame.encode();
    flush(peer);
    if (peer.out.size() <= limits_.unread_bytes) return;
    peer.out.clear();
    peer.dead = true;
    fail(fmt::format("rank {} does not read what it asked for, {} bytes so far", peer.rank,
                     limits_.unread_bytes));
  }

  void reply(Peer& peer, uint32_t id, std::string value) { send(peer, {Op::ok, id, "", std::move(value)}); }
  void refuse(Peer& peer, uint32_t id) { send(peer, {Op::refuse, id, "", failure_}); }

  void flush(Peer& peer) {
    while (!peer.out.empty()) {
      const ssize_t n = ::send(peer.socket.fd(), peer.out.data(), peer.out.size(), MSG_NOSIGNAL);
      if (n > 0) {
        peer.out.erase(0, static_cast<size_t>(n));
      } else {
        if (errno != EAGAIN && errno != EINTR) peer.dead = true;
        return;
      }
    }
  }

  void serve(Peer& peer) {
    flush(peer);
    char chunk[4096];
    try {
      handle_received(peer);
      while (!peer.dead) {
        const ssize_t n = recv(peer.socket.fd(), chunk, sizeof chunk, 0);
        if (n > 0) {
          peer.in.append(chunk, static_cast<size_t>(n));
          handle_received(peer);
        } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
          peer.dead = true;
        } else if (errno == EAGAIN) {
          return;
        }
      }
    } catch (const CommError&) {
      peer.dead = true;  // the peer is not a Gradwire client
    }
  }

  void handle_received(Peer& peer) {
    while (auto frame = Frame::decode(peer.in)) {
      const bool has_reply = frame->op != Op::message;
      const uint32_t id = frame->id;
      try {
        handle(peer, std::move(*frame));
      } catch (const OverStoreLimit& error) {
        fail(fmt::format("rank {} {}", peer.rank, error.what()));
        if (has_reply) refuse(peer, id);
      }
    }
  }

  // ---- Joining

  void hello(Listener::Caller caller) {
    if (caller.first.op != Op::hello) return;  // the caller is not a Gradwire client
    StoreHello me;
    try {
      me = StoreHello::decode(caller.first.value);
    } catch (const CommError&) {
      return;
    }
    auto peer = std::make_unique<Peer>(Peer{std::move(caller.socket), me.rank, caller.first.key == "watch"});
    std::string why = reason_to_retry(me);
    const Op answer = why.empty() ? Op::refuse : Op::again;
    if (why.empty()) why = reason_to_refuse(me, peer->watches, caller.address);
    if (!why.empty()) return send(*peer, {answer, caller.first.id, "", why});  // the caller then hangs up
    Peer& joined = *peers_.emplace_back(std::move(peer));
    if (joined.watches) {
      roll_.ranks[joined.rank].presence = Presence::silent;
      if (!roll_.any(Presence::never_came) && !formed_at_) formed_at_ = SteadyClock::now();
    }
    reply(joined, caller.first.id, "");
    if (joined.watches && !failure_.empty()) send(joined, {Op::failed, 0, "", failure_});
    serve(joined);
  }

  // Returns why the rank must look for another store, which may soon replace this store; "" if the rank may
  // join this store.
  std::string reason_to_retry(const StoreHello& me) const {
    if (!me.job.empty() && !job_.empty() && me.job != job_) {
      return fmt::format("the process there {}: {}, and this rank to {}", kOtherJob, job_, me.job);
    }
    if (me.rank < 0 || me.rank >= world_) return "";
    if (!failure_.empty() && roll_.ranks[me.rank].presence != Presence::never_came) {
      return "the store there belongs to a group that has failed";
    }
    if (roll_.ranks[me.rank].presence == Presence::left) {
      return "the store there belongs to a group that is shutting down";
    }
    return "";
  }

  std::string reason_to_refuse(const StoreHello& me, bool watches, const std::string& address) {
    if (me.world != world_) {
      return fmt::format("rank {} was started with a world of {}, rank 0 with {}", me.rank, me.world, world_);
    }
    if (me.rank < 0 || me.rank >= world_) {
      return fmt::format("there is no rank {} in a world of {}", me.rank, world_);
    }
    if (watches && roll_.ranks[me.rank].presence != Presence::never_came) {
      std::string why = fmt::format("two processes were started as rank {}", me.rank);
      if (!formed_at_ || SteadyClock::now() < *formed_at_ + StoreServer::kForming) {
        why += "; if they belong to two runs, give each run a port of its own, or GRADWIRE_JOB";
        fail(why);
      } else {
        print(0, fmt::format("rejected a second rank {} from {}", me.rank, address));
      }
      return why;
    }
    const auto connections = std::ranges::count(peers_, me.rank, &Peer::rank);
    if (static_cast<size_t>(connections) >= limits_.connections_of_rank) {
      return fmt::format("rank {} has {} connections to rank 0's store already", me.rank, connections);
    }
    return "";
  }

  // ---- Requests

  void handle(Peer& peer, Frame frame) {
    switch (frame.op) {
      case Op::set:
        set(peer, frame);
        break;
      case Op::get:
        if (values_.contains(frame.key)) return reply(peer, frame.id, values_[frame.key].value);
        if (!failure_.empty()) return refuse(peer, frame.id);
        defer(peer, frame, waiting_);
        break;
      case Op::add:
        // If a failed group still counted, some ranks could pass a barrier that other ranks cannot pass.
        if (!failure_.empty()) return refuse(peer, frame.id);
        if (!counts_.contains(frame.key)) insert(counts_, peer.rank, frame.key, "");
        reply(peer, frame.id, fmt::format("{}", ++counts_[frame.key].count));
        break;
      case Op::drop:
        remove(values_, frame.key);
        remove(counts_, frame.key);
        break;
      case Op::look:
        reply(peer, frame.id, values_.contains(frame.key) ? values_[frame.key].value : "");
        break;
      case Op::note:
        print_note(peer.rank, std::move(frame.value));
        break;
      case Op::fail:
        fail(frame.key);
        reply(peer, frame.id, failure_);
        break;
      case Op::state:
        roll_.ranks[peer.rank] = {Presence::here, frame.value};
        break;
      case Op::roll:
        defer(peer, frame, roll_callers_);
        break;
      case Op::bye:
        leave(peer);
        break;
      case Op::message:
        add_message(peer.rank, std::move(frame.value));
        break;
      default:
        throw CommError("not a request");
    }
  }

  void set(Peer& peer, const Frame& frame) {
    remove(values_, frame.key);
    insert(values_, peer.rank, frame.key, frame.value);
    reply(peer, frame.id, "");
    const auto first = std::stable_partition(waiting_.begin(), waiting_.end(),
                                             [&](const Waiting& w) { return w.key != frame.key; });
    const std::vector<Waiting> answered(first, waiting_.end());
    waiting_.erase(first, waiting_.end());
    for (const Waiting& w : answered) reply(*w.peer, w.id, frame.value);
  }

  // Adds a key and counts its bytes for the rank. Throws OverStoreLimit.
  void insert(std::map<std::string, Key>& keys, int rank, const std::string& name, const std::string& value) {
    const size_t bytes = name.size() + value.size() + kKeyOverhead;
    size_t& used = usage_[static_cast<size_t>(rank)].key_bytes;
    require<OverStoreLimit>(
        used + bytes <= limits_.key_bytes_of_rank && key_bytes_ + bytes <= limits_.key_bytes,
        "leaves more with rank 0 than it has room for: {} bytes in addition to its {} bytes and "
        "the {} bytes of all ranks",
        bytes, used, key_bytes_);
    used += bytes;
    key_bytes_ += bytes;
    keys[name] = {value, 0, rank, bytes};
  }

  void remove(std::map<std::string, Key>& keys, const std::string& name) {
    const auto found = keys.find(name);
    if (found == keys.end()) return;
    usage_[static_cast<size_t>(found->second.rank)].key_bytes -= found->second.bytes;
    key_bytes_ -= found->second.bytes;
    keys.erase(found);
  }

  // Queues a message to rank 0. Throws OverStoreLimit.
  void add_message(int rank, std::string message) {
    std::lock_guard lock(mutex_);
    const size_t bytes = message.size() + kMessageOverhead;
    size_t& used = usage_[static_cast<size_t>(rank)].message_bytes;
    require<OverStoreLimit>(
        used + bytes <= limits_.message_bytes_of_rank && message_bytes_ + bytes <= limits_.message_bytes,
        "has sent rank 0 more messages than it has room for: rank 0 has not taken the earlier messages");
    used += bytes;
    message_bytes_ += bytes;
    messages_[static_cast<size_t>(rank)].push_back(std::move(message));
    changed_.notify_all();
  }

  // Returns the oldest message of rank `from`: see StoreServer::take_message().
  std::optional<std::string> take_message(int from, SteadyClock::time_point deadline) {
    std::unique_lock lock(mutex_);
    auto& messages = messages_.at(static_cast<size_t>(from));
    wait_until(changed_, lock, deadline, [&] { return !messages.empty() || !failure_.empty(); });
    if (messages.empty() && !failure_.empty()) throw CommError(failure_);
    if (messages.empty()) return std::nullopt;
    std::string message = std::move(messages.front());
    messages.pop_front();
    const size_t bytes = message.size() + kMessageOverhead;
    usage_[static_cast<size_t>(from)].message_bytes -= bytes;
    message_bytes_ -= bytes;
    return message;
  }

  void leave(Peer& peer) {
    peer.leaving = true;
    if (!formed_at_) fail(fmt::format("rank {} left before all ranks had joined", peer.rank));
    if (failure_.empty()) {
      roll_.ranks[peer.rank].presence = Presence::left;
    } else if (roll_.ranks[peer.rank].presence == Presence::silent) {
      roll_.ranks[peer.rank].presence = Presence::here;  // the rank leaves because of the failure
    }
  }

  // Defers the answer to a request: appends the request to `list`. Throws OverStoreLimit if the rank has too
  // many unanswered requests.
  void defer(Peer& peer, const Frame& frame, std::vector<Waiting>& list) {
    const auto its =
        std::count_if(list.begin(), list.end(), [&](const Waiting& w) { return w.peer->rank == peer.rank; });
    if (static_cast<size_t>(its) >= limits_.unanswered_of_rank) {
      throw OverStoreLimit("waits for the answers to {} requests at once", its);
    }
    list.push_back({&peer, frame.id, frame.key});
  }

  static void print(int rank, const std::string& text) {
    print_error_line(fmt::format("rank {} {}", rank, text));
  }

  // Prints a note of a rank. Replaces control characters, which a terminal could interpret, and truncates
  // long notes.
  void print_note(int rank, std::string text) {
    constexpr size_t kMaxCharacters = 1000;
    size_t& printed = usage_[static_cast<size_t>(rank)].notes;
    if (printed == limits_.notes_of_rank) return;
    if (text.size() > kMaxCharacters) text.resize(kMaxCharacters);
    std::replace_if(
        text.begin(), text.end(), [](unsigned char c) { return c < ' ' || c == 0x7f; }, ' ');
    print(rank, ++printed < limits_.notes_of_rank ? text : "says more than is printed from here on");
  }

  // ---- Failures

  void fail(const std::string& why) {
    if (!failure_.empty()) return;
    {
      std::lock_guard lock(mutex_);
      failure_ = why;
      changed_.notify_all();
    }
    roll_due_at_ = SteadyClock::now() + kRollTime;
    for (auto& peer : peers_) {
      if (peer->watches) send(*peer, {Op::failed, 0, "", failure_});
    }
    // The awaited keys will never be set.
    for (const Waiting& w : waiting_) refuse(*w.peer, w.id);
    waiting_.clear();
  }

  bool roll_is_over() const { return roll_due_at_ && SteadyClock::now() >= *roll_due_at_; }

  void remove_dead_peers() {
    for (auto& peer : peers_) {
      if (!peer->dead) continue;
      for (auto* list : {&waiting_, &roll_callers_})
        std::erase_if(*list, [&](const Waiting& w) { return w.peer == peer.get(); });
      if (peer->watches && !peer->leaving) {
        roll_.ranks[peer->rank].presence = Presence::gone;
        fail(fmt::format("rank {} is gone: its process ended or its machine cut the connection", peer->rank));
      }
    }
    std::erase_if(peers_, std::mem_fn(&Peer::dead));
  }

  const StoreLimits limits_;
  const int world_;
  const std::string job_;
  Listener listener_;
  std::vector<Socket> invited_;  // each socket is closed once its process has joined
  WakeEvent wake_;
  std::atomic<bool> stopping_{false};
  std::vector<std::unique_ptr<Peer>> peers_;
  std::map<std::string, Key> values_, counts_;
  size_t key_bytes_ = 0;  // bytes of all ranks' keys
  std::vector<Waiting> waiting_, roll_callers_;
  RollCall roll_;
  // roll_due_at_: the time until which ranks may answer after a failure.
  std::optional<SteadyClock::time_point> roll_due_at_, closing_at_, formed_at_;

  // Guards the messages to rank 0 that rank 0 has not taken, and their bytes. Only this object's thread
  // changes failure_, with the lock.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<std::string>> messages_;  // by rank
  size_t message_bytes_ = 0;                       // bytes of all ranks' messages
  std::vector<Usage> usage_;
  std::string failure_, refusal_;  // see StoreServer::failure(), refusal()
};

StoreServer::StoreServer(Socket listener, int world, const std::string& key, const std::string& job,
                         const StoreLimits& limits, std::vector<Socket> invited)
    : loop_(std::make_unique<Loop>(std::move(listener), world, key, job, limits, std::move(invited))) {
  thread_ = Thread("the thread of the store", [this] { loop_->run(); });
}

StoreServer::~StoreServer() {
  loop_->stopping_ = true;
  loop_->wake_.set();
  thread_.join();
}

int StoreServer::port() const {
  return local_port(loop_->listener_.socket());
}

std::optional<std::string> StoreServer::take_message(int from, SteadyClock::time_point deadline) {
  return loop_->take_message(from, deadline);
}

std::string StoreServer::failure() const {
  std::lock_guard lock(loop_->mutex_);
  return loop_->failure_;
}

std::string StoreServer::refusal() const {
  std::lock_guard lock(loop_->mutex_);
  return loop_->refusal_;
}

}  // namespace gradwire
