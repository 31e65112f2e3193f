#include "collectives/transport/gloo.h"

#include "kernels/error.h"

#ifdef GRADWIRE_HAS_GLOO

#include <gloo/transport/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>

#include "collectives/transport/gloo_messages.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

using namespace gloo_messages;

// Gloo's texts begin with a place in its source: "[./gloo/pair.cc:598] ...".
std::string without_location(const std::string& text) {
  size_t end = text.find("] ");
  return text.starts_with("[") && end != std::string::npos ? text.substr(end + 2) : text;
}

// Gloo writes to sockets without MSG_NOSIGNAL; a peer that is gone must be an error, not the end of this
// process.
class NoSigpipe {
 public:
  NoSigpipe() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~NoSigpipe() {
    if (!was_pending_) {
      timespec now = {};
      while (sigtimedwait(&pipe_, nullptr, &now) == SIGPIPE) {
      }
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t pipe_, before_;
  bool was_pending_ = false;
};

class GlooTransport final : public Transport {
 public:
  explicit GlooTransport(const GlooOptions& options) : group_(options.group) {
    auto deadline = SteadyClock::now() + options.group.join_timeout();
    group_.store().watch([this](const std::string& cause) { group_failed(cause); },
                         [this] { return where(); });
    NoSigpipe guard;
    try {
      connect(options, deadline);
      group_.barrier();
    } catch (const Error& error) {
      give_up("joining", error.what());
    } catch (const std::exception& error) {  // Gloo's
      give_up("joining", error.what());
    }
    std::lock_guard lock(mutex_);
    where_ = "not in a collective yet";
  }

  // First says that it leaves in peace, then hangs up.
  ~GlooTransport() override { group_.leave(); }

  int rank() const override { return group_.rank(); }
  int world() const override { return group_.world(); }
  Device device() const override { return Device::host(); }
  const char* name() const override { return "gloo"; }

  void begin(const Stream& stream, const Call& call) override {
    if (world() > 1) stream.submit([this, &call] { enter(call); });
  }

  void exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                const ExchangeLabel& label) override {
    if (transfers.empty()) return;
    stream.submit([this, &transfers, &label] {
      begin_exchange(transfers, label);
      end_exchange();
    });
  }

  void start(const Stream& stream, const std::vector<Transfer>& transfers,
             const ExchangeLabel& label) override {
    stream.submit([this, &transfers, &label] { begin_exchange(transfers, label); });
  }

  void finish(const Stream& stream) override {
    stream.submit([this] { end_exchange(); });
  }

  void barrier() override {
    {
      std::lock_guard lock(mutex_);
      where_ = "at a barrier";
    }
    try {
      group_.barrier();
    } catch (const CommError& error) {
      give_up("at a barrier", error.what());
    }
    std::lock_guard lock(mutex_);
    where_ = "not in a collective; its last was a barrier";
  }

  void send_note(const std::string& note) override {
    try {
      group_.send_note(note);
    } catch (const CommError& error) {
      give_up("reporting to rank 0", error.what());
    }
  }

  std::string take_note(int from) override {
    try {
      return group_.take_note(from);
    } catch (const CommError& error) {
      give_up("waiting for rank " + std::to_string(from) + "'s report", error.what());
    }
  }

  void abort(const std::string& reason) override {
    {
      std::lock_guard lock(mutex_);
      if (!last_words_.empty()) return;  // the group has heard of it
    }
    std::string cause = "rank " + std::to_string(rank()) + " gave up: " + reason;
    group_.store().report(cause);
    group_failed(cause);
  }

 private:
  static constexpr const char* kWaiting = ", waiting for rank ";
  using Pending = ::gloo::transport::UnboundBuffer;

  // A message on its way.
  struct Posted {
    std::unique_ptr<Pending> buffer;
    Transfer::Kind kind = Transfer::Kind::send;
    int peer = 0;
    size_t bytes = 0;
    uint64_t slot = 0;  // tells headers from payload
    bool done = false;
  };

  // An exchange on its way. The buffers refer to the headers, so it stays where it is.
  struct InFlight {
    std::string here;  // "call 17, allreduce of ..., round 3 of 6"
    std::map<int, Header> expected, sent, arrived;
    CallHeader mine, previous;
    std::vector<Posted> posted;
    uint64_t bytes = 0;  // of payload that leaves
  };

  void connect(const GlooOptions& options, SteadyClock::time_point deadline) {
    std::string address = group_.address(deadline);
    ::gloo::transport::tcp::attr attributes(address.c_str());
    attributes.iface = options.interface;
    device_ = ::gloo::transport::tcp::CreateDevice(attributes);
    context_ = device_->createContext(rank(), world());
    // Gloo waits five times this for a connection.
    auto left = std::chrono::duration_cast<milliseconds>(deadline - SteadyClock::now());
    context_->setTimeout(std::max(milliseconds(20), left / 5));
    std::string addresses;
    size_t address_bytes = 0;
    for (int r = 0; r < world(); ++r) {
      if (r == rank()) continue;
      std::vector<char> bytes = context_->createPair(r)->address().bytes();
      address_bytes = bytes.size();
      addresses.append(bytes.begin(), bytes.end());
    }
    group_.store().set("gloo/" + std::to_string(rank()), addresses);
    for (int r = 0; r < world(); ++r) {
      if (r == rank()) continue;
      std::string theirs = group_.store().get("gloo/" + std::to_string(r), deadline,
                                              "waiting for rank " + std::to_string(r) + " to join");
      // A rank has no connection to itself: its list leaves it out.
      size_t index = static_cast<size_t>(rank() > r ? rank() - 1 : rank());
      if (theirs.size() != address_bytes * static_cast<size_t>(world() - 1)) {
        throw CommError("rank " + std::to_string(r) +
                        " has addresses of another kind; are all ranks the same build?");
      }
      auto first = theirs.begin() + static_cast<std::ptrdiff_t>(index * address_bytes);
      try {
        context_->getPair(r)->connect({first, first + static_cast<std::ptrdiff_t>(address_bytes)});
      } catch (const std::exception& error) {
        throw CommError("connecting to rank " + std::to_string(r) + ": " + without_location(error.what()));
      }
    }
  }

  // Called by the watcher's thread, or by the one that noticed: wakes the exchange that is under way.
  void group_failed(const std::string& cause) {
    std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = cause;
    for (Pending* pending : active_) {
      pending->abortWaitRecv();
      pending->abortWaitSend();
    }
  }

  std::string failure() {
    std::lock_guard lock(mutex_);
    return failure_;
  }

  // Tells the group, hears who still answers, and throws with all that is known.
  [[noreturn]] void give_up(const std::string& doing, const std::string& cause) {
    std::string text = "rank " + std::to_string(rank()) + ": " + doing + ": ";
    const int waited_for = waiting_for_.load();
    {
      std::lock_guard lock(mutex_);
      if (!last_words_.empty()) throw CommError(text + "the group has failed before: " + last_words_);
    }
    text += cause;
    std::optional<std::string> first = group_.store().report(text);
    group_failed(first.value_or(text));
    if (!first) {
      text += "; no answer from rank 0, which keeps the roll";
    } else {
      if (*first != text && cause.find(*first) == std::string::npos) text += "; the first to fail: " + *first;
      text += who_is_where(waited_for);
    }
    std::lock_guard lock(mutex_);
    last_words_ = text;
    throw CommError(text);
  }

  // Where this rank stands, for the others: "in call 17, allreduce of ..., waiting for rank 2".
  std::string where() {
    int peer = waiting_for_.load();
    std::lock_guard lock(mutex_);
    return peer < 0 ? where_ : where_ + kWaiting + std::to_string(peer);
  }

  // "; gone: rank 2; rank 3 is in call 17, ..., waiting for rank 1; ...": who does not answer, then whom this
  // rank waits for, whom that one waits for, and so on, which leads to the culprit; then others.
  std::string who_is_where(int waited_for) {
    RollCall roll = group_.store().roll_call();
    std::string text = roll.absent();
    if (!text.empty()) text = "; " + text;
    const int world = static_cast<int>(roll.ranks.size());
    std::set<int> told = {rank()};
    auto tell = [&](int r) {
      const std::string& state = roll.ranks[r].state;
      if (roll.ranks[r].presence != RollCall::Presence::here || state.empty() || !told.insert(r).second) {
        return false;
      }
      text += "; rank " + std::to_string(r) + " is " + state;
      return true;
    };
    for (int r = waited_for; r >= 0 && r < world && told.size() < 6 && tell(r);) {
      size_t at = roll.ranks[r].state.rfind(kWaiting);
      r = at == std::string::npos ? -1 : std::atoi(roll.ranks[r].state.c_str() + at + std::strlen(kWaiting));
    }
    for (int r = 0; r < world && told.size() < 5; ++r) tell(r);
    return text;
  }

  // From here to the end of end_exchange(): on the stream's thread.
  void enter(const Call& call) {
    if (unannounced_) {  // the last call moved nothing; its neighbours still compare
      begin_exchange({}, {0, call_.what});
      end_exchange();
    }
    call_ = call;
    ++sequence_;
    rolling_ = mix(rolling_, call.hash);
    unannounced_ = true;
  }

  // "call 17, allreduce of ...": what this rank does, for every error.
  std::string named(const std::string& what) const {
    return sequence_ == 0 ? what : "call " + std::to_string(sequence_) + ", " + what;
  }

  void begin_exchange(const std::vector<Transfer>& transfers, const ExchangeLabel& label) {
    const uint64_t tag = mix(rolling_, label.tag);
    InFlight& e = *in_flight_.emplace_back(std::make_unique<InFlight>());
    e.here = named(label.what);
    for (const Transfer& t : transfers) {
      if (t.peer < 0 || t.peer >= world() || t.peer == rank()) {
        in_flight_.pop_back();
        throw BadInput(label.what + ": rank " + std::to_string(rank()) + " cannot exchange with rank " +
                       std::to_string(t.peer));
      }
      if (t.kind == Transfer::Kind::send) e.bytes += t.bytes;
      if (sequence_ > 0) continue;  // in a call, its header stands for all that it exchanges
      auto& headers = t.kind == Transfer::Kind::send ? e.sent : e.expected;
      headers.try_emplace(t.peer, tag, e.here).first->second.add(t.bytes);
    }
    e.posted.reserve(transfers.size() + e.expected.size() + e.sent.size() + 2);
    {
      std::lock_guard lock(mutex_);
      if (in_flight_.size() == 1) where_ = "in " + e.here;
    }
    NoSigpipe guard;
    try {
      post_all(e, transfers, tag);
    } catch (const std::exception& error) {
      fail(e, nullptr, error, SteadyClock::time_point::max());
    }
  }

  void post_all(InFlight& e, const std::vector<Transfer>& transfers, uint64_t tag) {
    const int next = (rank() + 1) % world(), before = (rank() + world() - 1) % world();
    if (unannounced_) {
      unannounced_ = false;
      e.mine = CallHeader(sequence_, rolling_, call_.what);
      post(e, Transfer::Kind::receive, before, &e.previous, sizeof e.previous, kCallSlot);
      post(e, Transfer::Kind::send, next, &e.mine, sizeof e.mine, kCallSlot);
    }
    for (auto& [peer, header] : e.expected) {
      Header& incoming = e.arrived.try_emplace(peer, 0, "").first->second;
      post(e, Transfer::Kind::receive, peer, &incoming, sizeof(Header), kHeaderSlot);
    }
    for (const Transfer& t : transfers) {
      if (t.kind == Transfer::Kind::receive && t.bytes > 0) {
        post(e, t.kind, t.peer, t.data, t.bytes, payload_slot(tag, t.bytes));
      }
    }
    for (auto& [peer, header] : e.sent) {
      post(e, Transfer::Kind::send, peer, &header, sizeof(Header), kHeaderSlot);
    }
    for (const Transfer& t : transfers) {
      if (t.kind == Transfer::Kind::send && t.bytes > 0) {
        post(e, t.kind, t.peer, t.data, t.bytes, payload_slot(tag, t.bytes));
      }
    }
  }

  void end_exchange() {
    if (in_flight_.empty()) throw CommError("the group has failed before: " + failure());
    InFlight& e = *in_flight_.front();
    const auto deadline = SteadyClock::now() + group_.timeout();
    NoSigpipe guard;
    const Posted* at = nullptr;
    try {
      for (Posted& p : e.posted) {
        at = &p;
        waiting_for_ = p.peer;
        wait(p, deadline);
        p.done = true;
        if (p.kind == Transfer::Kind::send) continue;
        if (p.slot == kCallSlot) compare(e.mine, e.previous, p.peer);
        if (p.slot == kHeaderSlot) compare(e.expected.at(p.peer), e.arrived.at(p.peer), p.peer);
      }
    } catch (const std::exception& error) {
      fail(e, at, error, deadline);
    }
    bytes_sent_.fetch_add(e.bytes, std::memory_order_relaxed);
    leave(e.posted.size());
    in_flight_.pop_front();
  }

  // The exchange that was under way longest is, with its first `count` messages. Gloo's buffers may be
  // destroyed while an operation on them is pending: it then leaves them alone.
  void leave(size_t count) {
    waiting_for_ = -1;
    std::lock_guard lock(mutex_);
    active_.erase(active_.begin(), active_.begin() + static_cast<std::ptrdiff_t>(count));
    where_ = in_flight_.size() > 1 ? "in " + in_flight_[1]->here
                                   : "not in a collective; its last was " + in_flight_[0]->here;
  }

  // Of exchange `e`, while it waited for `at` or, where that is null, posted.
  [[noreturn]] void fail(const InFlight& e, const Posted* at, const std::exception& error,
                         SteadyClock::time_point deadline) {
    struct Cleared {
      GlooTransport* self;
      ~Cleared() {
        self->waiting_for_ = -1;
        {
          std::lock_guard lock(self->mutex_);
          self->active_.clear();
          self->where_ = "not in a collective; its last was " + self->in_flight_.front()->here;
        }
        self->in_flight_.clear();
      }
    } cleared{this};
    if (const auto* mismatch = dynamic_cast<const Mismatch*>(&error)) give_up(e.here, mismatch->what());
    std::string cause = failure();
    if (cause.empty() && SteadyClock::now() >= deadline) {
      cause = "not done after " + std::to_string(group_.timeout().count()) + " ms";
    } else if (cause.empty()) {
      cause = "connection lost (" + without_location(error.what()) + ")";
    }
    give_up(e.here + ": " + pending_text(e.posted, at), cause);
  }

  struct Mismatch : std::runtime_error {
    using std::runtime_error::runtime_error;
  };

  void post(InFlight& e, Transfer::Kind kind, int peer, void* data, size_t bytes, uint64_t slot) {
    Posted& p = e.posted.emplace_back();
    p.kind = kind;
    p.peer = peer;
    p.bytes = bytes;
    p.slot = slot;
    p.buffer = context_->createUnboundBuffer(data, bytes);
    {
      std::lock_guard lock(mutex_);
      if (!failure_.empty()) throw CommError(failure_);
      active_.push_back(p.buffer.get());
    }
    kind == Transfer::Kind::send ? p.buffer->send(peer, slot) : p.buffer->recv(peer, slot);
  }

  void wait(Posted& p, SteadyClock::time_point deadline) {
    // Gloo takes -1 ms for "its default".
    auto left = std::max(milliseconds(1), std::chrono::ceil<milliseconds>(deadline - SteadyClock::now()));
    bool completed = p.kind == Transfer::Kind::send ? p.buffer->waitSend(left) : p.buffer->waitRecv(left);
    if (!completed) throw CommError("woken up");  // by group_failed()
  }

  void compare(const CallHeader& mine, const CallHeader& theirs, int peer) const {
    if (mine.agrees_with(theirs)) return;
    check_magic(theirs, peer);
    auto call = [](int r, const CallHeader& h) {
      return "rank " + std::to_string(r) + " makes call " + std::to_string(h.sequence) + ", " + h.text();
    };
    bool alike = mine.sequence == theirs.sequence && mine.text() == theirs.text();
    throw Mismatch("ranks disagree: " + call(rank(), mine) + "; " + call(peer, theirs) +
                   (alike ? "; this call or one before differs in something else" : ""));
  }

  template <typename H>
  void check_magic(const H& header, int peer) const {
    if (header.magic == H::kMagic) return;
    throw Mismatch("what rank " + std::to_string(peer) + " sent is no header of Gradwire's: it is corrupted");
  }

  void compare(const Header& expected, const Header& arrived, int peer) const {
    if (expected.agrees_with(arrived)) return;
    check_magic(arrived, peer);
    std::string from = "rank " + std::to_string(peer), theirs = arrived.text();
    auto amount = [](const Header& h) {
      return std::to_string(h.bytes) + " bytes in " + std::to_string(h.messages) +
             (h.messages == 1 ? " message" : " messages");
    };
    bool alike = amount(expected) == amount(arrived) && expected.text() == theirs;
    throw Mismatch("ranks disagree: rank " + std::to_string(rank()) + " expects " + amount(expected) +
                   " from " + from + ", which is in " + theirs + " and sends " + amount(arrived) +
                   (alike ? "; the calls differ in something else" : ""));
  }

  static bool is_header(const Posted& p) { return p.slot == kHeaderSlot || p.slot == kCallSlot; }

  // "waiting to receive 4096 bytes from rank 0 (3 receives and 2 sends pending, with ranks 0, 2)"
  std::string pending_text(const std::vector<Posted>& posted, const Posted* at) const {
    std::string text;
    if (at == nullptr) {
      if (posted.empty()) return "before the first transfer";
      const Posted& last = posted.back();
      text = std::string("starting to ") +
             (last.kind == Transfer::Kind::send ? "send to rank " : "receive from rank ") +
             std::to_string(last.peer);
    } else {
      bool send = at->kind == Transfer::Kind::send;
      text = std::string("waiting to ") + (send ? "send " : "receive ") +
             (is_header(*at) ? "" : std::to_string(at->bytes) + " bytes ") + (send ? "to" : "from") +
             " rank " + std::to_string(at->peer);
      if (at->slot == kCallSlot && !send)
        text = "waiting for rank " + std::to_string(at->peer) + " to begin it";
    }
    int receives = 0, sends = 0;
    std::set<int> peers;
    for (const Posted& p : posted) {
      if (p.done) continue;
      ++(p.kind == Transfer::Kind::send ? sends : receives);
      peers.insert(p.peer);
    }
    std::string list;
    for (int peer : peers) list += (list.empty() ? "" : ", ") + std::to_string(peer);
    return text + " (" + std::to_string(receives) + " receives and " + std::to_string(sends) +
           " sends pending, with ranks " + list + ")";
  }

  std::mutex mutex_;
  std::string failure_;     // the first this rank heard of
  std::string last_words_;  // what give_up() threw
  std::string where_ = "joining";
  std::vector<Pending*> active_;
  std::atomic<int> waiting_for_{-1};
  // Of the call this rank is in; they belong to the thread that runs exchanges.
  Call call_;
  uint64_t sequence_ = 0, rolling_ = 0;
  bool unannounced_ = false;  // nothing of this call has been sent yet
  // Destroyed in reverse: what is pending, then Gloo's threads, then the store.
  Membership group_;
  std::shared_ptr<::gloo::transport::Device> device_;
  std::shared_ptr<::gloo::transport::Context> context_;
  std::deque<std::unique_ptr<InFlight>> in_flight_;  // in the order in which they were started
};

}  // namespace

bool built_with_gloo() {
  return true;
}

std::unique_ptr<Transport> make_gloo_transport(const GlooOptions& options) {
  return std::make_unique<GlooTransport>(options);
}

}  // namespace gradwire

#else

namespace gradwire {

bool built_with_gloo() {
  return false;
}

std::unique_ptr<Transport> make_gloo_transport(const GlooOptions&) {
  throw BadInput(
      "this build has no Gloo transport, so ranks cannot be processes; install libgloo-dev and build again");
}

}  // namespace gradwire

#endif
