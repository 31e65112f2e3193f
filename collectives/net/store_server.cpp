// The server side of store.h: one thread, one poll loop, no blocking calls.
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <mutex>
#include <sstream>

#include "collectives/net/handshake.h"
#include "collectives/net/job.h"
#include "collectives/net/store.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"

namespace gradwire {

using Op = StoreMessage::Op;
using Presence = RollCall::Presence;

// Filled by the loop, drained by rank 0's own threads.
class StoreServer::Messages {
 public:
  Messages(int world, const StoreLimits& limits)
      : by_rank_(static_cast<size_t>(world)), bytes_of_(static_cast<size_t>(world)), limits_(limits) {}

  // Returns false if the message exceeds the limits.
  bool add(int rank, std::string message) {
    std::lock_guard lock(mutex_);
    const size_t more = message.size() + kOverhead;
    size_t& its_bytes = bytes_of_[static_cast<size_t>(rank)];
    if (its_bytes + more > limits_.message_bytes_of_rank || bytes_ + more > limits_.message_bytes)
      return false;
    its_bytes += more;
    bytes_ += more;
    by_rank_[static_cast<size_t>(rank)].push_back(std::move(message));
    changed_.notify_all();
    return true;
  }
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
  std::string failure() {
    std::lock_guard lock(mutex_);
    return failure_;
  }
  std::optional<std::string> take(int from, SteadyClock::time_point deadline) {
    std::unique_lock lock(mutex_);
    auto& messages = by_rank_.at(static_cast<size_t>(from));
    wait_until(changed_, lock, deadline, [&] { return !messages.empty() || !failure_.empty(); });
    if (messages.empty() && !failure_.empty()) throw CommError(failure_);
    if (messages.empty()) return std::nullopt;
    std::string message = std::move(messages.front());
    messages.pop_front();
    const size_t less = message.size() + kOverhead;
    bytes_of_[static_cast<size_t>(from)] -= less;
    bytes_ -= less;
    return message;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  static constexpr size_t kOverhead = 64;  // bytes of an empty message
  std::vector<std::deque<std::string>> by_rank_;
  std::vector<size_t> bytes_of_;  // by rank
  size_t bytes_ = 0;
  const StoreLimits limits_;
  std::string failure_;
};

class StoreServer::Loop {
 public:
  Loop(Socket listener, int world, const std::string& key, const std::string& job, Messages& messages,
       const StoreLimits& limits, std::vector<Socket> invited)
      : messages_(messages),
        limits_(limits),
        key_bytes_of_(static_cast<size_t>(world)),
        notes_of_(static_cast<size_t>(world)),
        listener_(std::move(listener)),
        world_(world),
        credentials_{key, kStorePurpose},
        job_(job),
        invited_(std::move(invited)) {
    roll_.ranks.resize(world, {Presence::never_came, ""});
  }

  int port() const { return local_port(listener_); }

  void stop() {
    stopping_ = true;
    wake_.set();
  }

  void run() {
    try {
      serve_until_stopped();
    } catch (const std::exception&) {  // no memory: the ranks detect that the store is gone
      messages_.fail_without_memory();
      peers_.clear();
      listener_.close();
    }
  }

 private:
  void serve_until_stopped() {
    while (true) {
      if (stopping_ && !closing_at_) start_closing();
      if (closing_at_ && (SteadyClock::now() >= *closing_at_ || only_rank_0_left())) return say_goodbye();
      std::vector<pollfd> entries = {{wake_.fd(), POLLIN, 0}, {acceptor_.fd(), POLLIN, 0}};
      for (const auto& peer : peers_) {
        entries.push_back(
            {peer->socket.fd(), static_cast<short>(peer->out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
      }
      const size_t invited_at = entries.size();
      for (const Socket& socket : invited_) entries.push_back({socket.fd(), POLLIN, 0});  // < 0: ignored
      poll(entries.data(), entries.size(), milliseconds_to_next_event());
      if (entries[0].revents != 0) wake_.clear();
      for (size_t i = 0; i < invited_.size(); ++i) {
        if (entries[invited_at + i].revents != 0) hear_of_invited(i);
      }
      for (size_t i = 0; i + 2 < invited_at; ++i) {
        if (entries[i + 2].revents != 0 || peers_[i]->is_unauthenticated()) serve(*peers_[i]);
      }
      if (entries[1].revents != 0) accept_some();
      // Once formed, no other connection is needed; new connections are rejected or wait.
      if (!formed_at_ && !acceptor_.refused().empty()) fail("rank 0 " + acceptor_.refused());
      bury_the_dead();
      if (roll_due_at_ && SteadyClock::now() >= *roll_due_at_) answer_roll_calls();
    }
  }

  struct Peer {
    explicit Peer(Socket its, const Credentials& credentials)
        : socket(std::move(its)), challenge(std::make_unique<Challenge>(credentials)) {}

    Socket socket;
    std::unique_ptr<Challenge> challenge;  // until answered
    std::string in, out;
    int rank = -1;  // until hello
    std::string from = socket.peer_address();
    bool watches = false;
    bool leaving = false;  // sent bye
    bool dead = false;
    const SteadyClock::time_point hello_until = SteadyClock::now() + 2 * kHandshakeTime;

    bool is_unauthenticated() const { return rank < 0; }
  };
  struct Value {
    std::string text;
    int rank = 0;  // the rank that set it
  };
  struct Waiting {
    Peer* peer;
    uint32_t id;
    std::string key;
  };

  int milliseconds_to_next_event() const {
    auto next = SteadyClock::now() + std::chrono::hours(1);
    if (unauthenticated() > 0) next = SteadyClock::now() + kHandshakeTime / 5;
    if (closing_at_) next = std::min(next, *closing_at_);
    if (roll_due_at_ && !roll_callers_.empty()) next = std::min(next, *roll_due_at_);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - SteadyClock::now());
    return static_cast<int>(std::max<int64_t>(0, acceptor_.patience(left).count()));
  }

  void start_closing() { closing_at_ = SteadyClock::now() + StoreServer::kLinger; }

  void say_goodbye() {
    for (auto& peer : peers_) {
      if (peer->watches && failure_.empty()) send(*peer, {Op::closing, 0, "", ""});
    }
  }

  // Returns whether only rank 0 itself and ranks that did not answer the roll call remain.
  bool only_rank_0_left() const {
    const bool roll_is_over = roll_due_at_ && SteadyClock::now() >= *roll_due_at_;
    return std::none_of(peers_.begin(), peers_.end(), [&](const auto& p) {
      return p->watches && p->rank != 0 &&
             !(roll_is_over && roll_.ranks[p->rank].presence == Presence::silent);
    });
  }

  void send(Peer& peer, const StoreMessage& message) {
    peer.out += message.encode();
    flush(peer);
    if (peer.out.size() <= limits_.unread_bytes) return;
    peer.out.clear();
    peer.dead = true;
    if (!peer.is_unauthenticated()) {
      too_much(peer.rank,
               fmt::format("does not read what it asked for, {} bytes so far", limits_.unread_bytes));
    }
  }

  // A rank that exceeds rank 0's limits fails the group; none of its data is kept from then on.
  void too_much(int rank, const std::string& what) { fail(fmt::format("rank {} {}", rank, what)); }
  void reply(Peer& peer, uint32_t id, std::string value) { send(peer, {Op::ok, id, "", std::move(value)}); }

  void flush(Peer& peer) {
    while (!peer.out.empty()) {
      ssize_t n = ::send(peer.socket.fd(), peer.out.data(), peer.out.size(), MSG_NOSIGNAL);
      if (n > 0) {
        peer.out.erase(0, static_cast<size_t>(n));
      } else {
        if (errno != EAGAIN && errno != EINTR) peer.dead = true;
        return;
      }
    }
  }

  // Handles a joiner that has joined or died.
  void hear_of_invited(size_t i) {
    char byte;
    const ssize_t n = recv(invited_[i].fd(), &byte, 1, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    invited_[i].close();
    if (n > 0) return;
    const size_t rank = static_cast<size_t>(world_) - invited_.size() + i;
    fail(fmt::format("the process that was to become rank {} is gone", rank));
  }

  size_t unauthenticated() const {
    return static_cast<size_t>(
        std::count_if(peers_.begin(), peers_.end(), [](const auto& p) { return p->is_unauthenticated(); }));
  }

  // Accepts at most as many connections as may wait, so that a flood of connections cannot keep the ranks
  // from being served. Drops the oldest connections without a hello.
  void accept_some() {
    for (size_t i = 0; i < kMaxUnauthenticated; ++i) {
      auto socket = acceptor_.accept();
      if (!socket) return;
      if (unauthenticated() >= kMaxUnauthenticated + 2 * static_cast<size_t>(world_)) {
        auto oldest =
            std::find_if(peers_.begin(), peers_.end(), [](const auto& p) { return p->is_unauthenticated(); });
        reject(**oldest, kTooMany);
        peers_.erase(oldest);
      }
      peers_.push_back(std::make_unique<Peer>(std::move(*socket), credentials_));
    }
  }

  void reject(const Peer& peer, const std::string& why) {
    if (const std::string text = rejected_.note(peer.from, why); !text.empty()) print(0, text);
  }

  static void print(int rank, const std::string& text) {
    print_error_line(fmt::format("rank {} {}", rank, text));
  }

  // A rank's text may be damaged or contain control characters for a terminal.
  void print_note(int rank, std::string text) {
    constexpr size_t kMostCharacters = 1000;
    size_t& printed = notes_of_[static_cast<size_t>(rank)];
    if (printed == limits_.notes_of_rank) return;
    if (text.size() > kMostCharacters) text.resize(kMostCharacters);
    std::replace_if(
        text.begin(), text.end(), [](unsigned char c) { return c < ' ' || c == 0x7f; }, ' ');
    print(rank, ++printed < limits_.notes_of_rank ? text : "says more than is printed from here on");
  }

  void serve(Peer& peer) {
    if (peer.challenge) {
      switch (peer.challenge->advance(peer.socket)) {
        case Challenge::State::waiting:
          return;
        case Challenge::State::refused:
          reject(peer, peer.challenge->why());
          peer.dead = true;
          return;
        case Challenge::State::proved:
          peer.challenge = nullptr;
      }
    }
    if (peer.is_unauthenticated() && SteadyClock::now() >= peer.hello_until) {
      reject(peer, kSaidNothing);
      peer.dead = true;
      return;
    }
    flush(peer);
    char chunk[4096];
    try {
      while (!peer.dead) {
        ssize_t n = recv(peer.socket.fd(), chunk, sizeof chunk, 0);
        if (n > 0) {
          peer.in.append(chunk, static_cast<size_t>(n));
          while (auto message = StoreMessage::decode(peer.in)) handle(peer, std::move(*message));
        } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
          peer.dead = true;
        } else if (errno == EAGAIN) {
          return;
        }
      }
    } catch (const CommError&) {
      peer.dead = true;  // not a Gradwire client
    }
  }

  void handle(Peer& peer, StoreMessage m) {
    if (peer.is_unauthenticated() != (m.op == Op::hello)) throw CommError("hello comes first, and once");
    switch (m.op) {
      case Op::hello:
        hello(peer, m);
        break;
      case Op::set: {
        if (!keep(peer.rank, m.key, m.value)) {
          send(peer, {Op::refuse, m.id, "", failure_});
          break;
        }
        reply(peer, m.id, "");
        std::vector<Waiting> still;
        for (Waiting& w : waiting_) {
          w.key == m.key ? reply(*w.peer, w.id, m.value) : still.push_back(w);
        }
        waiting_ = std::move(still);
        break;
      }
      case Op::get:
        if (auto found = values_.find(m.key); found != values_.end()) {
          reply(peer, m.id, found->second.text);
        } else if (!failure_.empty()) {
          send(peer, {Op::refuse, m.id, "", failure_});
        } else {
          wait(peer, m, waiting_);
        }
        break;
      case Op::add:
        // If a failed group still counted, some ranks could pass a barrier without the others.
        if (!failure_.empty()) {
          send(peer, {Op::refuse, m.id, "", failure_});
        } else {
          auto found = counts_.find(m.key);
          if (found == counts_.end()) {
            if (!account(peer.rank, cost(m.key, ""))) {
              send(peer, {Op::refuse, m.id, "", failure_});
              break;
            }
            found = counts_.emplace(m.key, Count{0, peer.rank}).first;
          }
          reply(peer, m.id, fmt::format("{}", ++found->second.times));
        }
        break;
      case Op::drop:
        drop(m.key);
        break;
      case Op::look: {
        const auto found = values_.find(m.key);
        reply(peer, m.id, found == values_.end() ? "" : found->second.text);
        break;
      }
      case Op::note:
        print_note(peer.rank, std::move(m.value));
        break;
      case Op::fail:
        fail(m.key);
        reply(peer, m.id, failure_);
        break;
      case Op::state:
        roll_.ranks[peer.rank] = {Presence::here, m.value};
        if (!missing()) answer_roll_calls();
        break;
      case Op::roll:
        wait(peer, m, roll_callers_);
        if (!missing() || !roll_due_at_ || SteadyClock::now() >= *roll_due_at_) answer_roll_calls();
        break;
      case Op::bye:
        // A rank that leaves because of the failure counts as present in the roll call.
        if (failure_.empty()) roll_.ranks[peer.rank].presence = Presence::left;
        peer.leaving = true;
        if (!failure_.empty() && roll_.ranks[peer.rank].presence == Presence::silent) {
          roll_.ranks[peer.rank].presence = Presence::here;
        }
        if (!missing()) answer_roll_calls();
        break;
      case Op::message:
        if (!messages_.add(peer.rank, std::move(m.value))) {
          too_much(peer.rank,
                   "has sent rank 0 more messages than it has room for: rank 0 has not taken those before");
        }
        break;
      default:
        throw CommError("not a request");
    }
  }

  // Returns the bytes taken by a key, its value and the map's overhead.
  static size_t cost(const std::string& key, const std::string& value) {
    return key.size() + value.size() + 128;
  }

  // Adds `more` bytes to a rank's account. Returns false and fails the group if that exceeds a limit.
  bool account(int rank, size_t more) {
    size_t& its_bytes = key_bytes_of_[static_cast<size_t>(rank)];
    if (its_bytes + more > limits_.key_bytes_of_rank || key_bytes_ + more > limits_.key_bytes) {
      too_much(
          rank,
          fmt::format("leaves more with rank 0 than it has room for: {} bytes after {} of its own and {} of "
                      "all ranks",
                      more, its_bytes, key_bytes_));
      return false;
    }
    its_bytes += more;
    key_bytes_ += more;
    return true;
  }
  void forget(int rank, size_t bytes) {
    key_bytes_of_[static_cast<size_t>(rank)] -= bytes;
    key_bytes_ -= bytes;
  }
  bool keep(int rank, const std::string& key, const std::string& value) {
    drop_value(key);
    if (!account(rank, cost(key, value))) return false;
    values_[key] = {value, rank};
    return true;
  }
  void drop_value(const std::string& key) {
    if (const auto found = values_.find(key); found != values_.end()) {
      forget(found->second.rank, cost(key, found->second.text));
      values_.erase(found);
    }
  }
  void drop(const std::string& key) {
    drop_value(key);
    if (const auto found = counts_.find(key); found != counts_.end()) {
      forget(found->second.rank, cost(key, ""));
      counts_.erase(found);
    }
  }

  // Defers the answer to a request.
  void wait(Peer& peer, const StoreMessage& m, std::vector<Waiting>& list) {
    const auto its =
        std::count_if(list.begin(), list.end(), [&](const Waiting& w) { return w.peer->rank == peer.rank; });
    if (static_cast<size_t>(its) >= limits_.unanswered_of_rank) {
      too_much(peer.rank, fmt::format("waits for the answers to {} requests at once", its));
      return send(peer, {Op::refuse, m.id, "", failure_});
    }
    list.push_back({&peer, m.id, m.key});
  }

  void hello(Peer& peer, const StoreMessage& m) {
    std::istringstream text(m.value);
    int rank = -1, world = -1;
    text >> rank >> world >> std::ws;
    std::string job;
    std::getline(text, job);
    bool watches = m.key == "watch";
    std::string why;
    bool try_again = true;
    if (!job.empty() && !job_.empty() && job != job_) {
      // Its own store may soon replace this one.
      why = fmt::format("the process there {}: {}, and this rank to {}", kOtherJob, job_, job);
    } else if (!failure_.empty() && rank >= 0 && rank < world_ &&
               roll_.ranks[rank].presence != Presence::never_came) {
      why = "the store there belongs to a group that has failed";
    } else if (rank >= 0 && rank < world_ && roll_.ranks[rank].presence == Presence::left) {
      why = "the store there belongs to a group that is shutting down";
    } else {
      try_again = false;
    }
    if (try_again) {
    } else if (world != world_) {
      why = fmt::format("rank {} was started with a world of {}, rank 0 with {}", rank, world, world_);
    } else if (rank < 0 || rank >= world) {
      why = fmt::format("there is no rank {} in a world of {}", rank, world);
    } else if (watches && roll_.ranks[rank].presence != Presence::never_came) {
      why = fmt::format("two processes were started as rank {}", rank);
      if (!formed_at_ || SteadyClock::now() < *formed_at_ + StoreServer::kForming) {
        why += "; if they belong to two runs, give each run a port of its own, or GRADWIRE_JOB";
        fail(why);
      } else {
        print(0, fmt::format("rejected a second rank {} from {}", rank, peer.from));
      }
    }
    const auto connections =
        std::count_if(peers_.begin(), peers_.end(), [&](const auto& p) { return p->rank == rank; });
    if (why.empty() && static_cast<size_t>(connections) >= limits_.connections_of_rank) {
      why = fmt::format("rank {} has {} connections to rank 0's store already", rank, connections);
    }
    if (!why.empty()) {
      send(peer, {Op::refuse, m.id, try_again ? "again" : "", why});
      return;
    }
    peer.rank = rank;
    peer.watches = watches;
    if (watches) {
      roll_.ranks[rank].presence = Presence::silent;
      const bool all = std::none_of(roll_.ranks.begin(), roll_.ranks.end(),
                                    [](const auto& entry) { return entry.presence == Presence::never_came; });
      if (all && !formed_at_) formed_at_ = SteadyClock::now();
    }
    reply(peer, m.id, "");
    if (watches && !failure_.empty()) send(peer, {Op::failed, 0, "", failure_});
  }

  void fail(const std::string& why) {
    if (!failure_.empty()) return;
    failure_ = why;
    messages_.fail(why);
    roll_due_at_ = SteadyClock::now() + StoreServer::kRollTime;
    for (auto& peer : peers_) {
      if (peer->watches) send(*peer, {Op::failed, 0, "", failure_});
    }
    // Their keys will never be set.
    for (const Waiting& w : waiting_) send(*w.peer, {Op::refuse, w.id, "", failure_});
    waiting_.clear();
  }

  // Returns whether a rank could still answer the roll call.
  bool missing() const {
    return std::any_of(roll_.ranks.begin(), roll_.ranks.end(),
                       [](const auto& entry) { return entry.presence == Presence::silent; });
  }

  void answer_roll_calls() {
    for (const Waiting& caller : roll_callers_) reply(*caller.peer, caller.id, roll_.encode());
    roll_callers_.clear();
  }

  void bury_the_dead() {
    for (auto& peer : peers_) {
      if (!peer->dead) continue;
      std::erase_if(waiting_, [&](const Waiting& w) { return w.peer == peer.get(); });
      std::erase_if(roll_callers_, [&](const Waiting& w) { return w.peer == peer.get(); });
      if (peer->watches && !peer->leaving) {
        roll_.ranks[peer->rank].presence = Presence::gone;
        fail(fmt::format("rank {} is gone: its process ended or its machine cut the connection", peer->rank));
        if (!missing()) answer_roll_calls();
      }
    }
    std::erase_if(peers_, [](const auto& peer) { return peer->dead; });
  }

  struct Count {
    int64_t times;
    int rank;  // the first to add
  };

  Messages& messages_;
  const StoreLimits limits_;
  std::vector<size_t> key_bytes_of_;  // by rank
  size_t key_bytes_ = 0;
  std::vector<size_t> notes_of_;  // printed lines, by rank
  Socket listener_;
  Acceptor acceptor_{listener_};
  WakeEvent wake_;
  const int world_;
  const Credentials credentials_;
  const std::string job_;
  RejectedConnections rejected_;
  std::vector<Socket> invited_;  // closed once they have joined
  std::atomic<bool> stopping_{false};
  std::vector<std::unique_ptr<Peer>> peers_;
  std::map<std::string, Value> values_;
  std::map<std::string, Count> counts_;
  std::vector<Waiting> waiting_, roll_callers_;
  std::string failure_;
  RollCall roll_;
  std::optional<SteadyClock::time_point> roll_due_at_, closing_at_, formed_at_;
};

StoreServer::StoreServer(Socket listener, int world, const std::string& key, const std::string& job,
                         const StoreLimits& limits, std::vector<Socket> invited)
    : messages_(std::make_unique<Messages>(world, limits)),
      loop_(std::make_unique<Loop>(std::move(listener), world, key, job, *messages_, limits,
                                   std::move(invited))),
      port_(loop_->port()) {
  thread_ = Thread("the thread of the store", [this] { loop_->run(); });
}

std::optional<std::string> StoreServer::take_message(int from, SteadyClock::time_point deadline) {
  return messages_->take(from, deadline);
}

std::string StoreServer::failure() const {
  return messages_->failure();
}

StoreServer::~StoreServer() {
  loop_->stop();
  thread_.join();
}

}  // namespace gradwire
