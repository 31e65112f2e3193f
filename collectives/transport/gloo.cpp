#include "collectives/transport/gloo.h"

#include "kernels/error.h"

#ifdef GRADWIRE_HAS_GLOO

#include <gloo/transport/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace gradwire {
namespace {

using std::chrono::milliseconds;

constexpr uint64_t kMagic = 0x31657269'77647267ull;
constexpr uint64_t kHeaderSlot = 1;

uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15ull + (hash << 6) + (hash >> 2);
  return hash * 0xff51afd7ed558ccdull;
}

// Precedes the payloads of one exchange from one rank to another.
struct Header {
  uint64_t magic = kMagic;
  uint64_t tag = 0;
  uint64_t messages = 0;
  uint64_t bytes = 0;  // of all messages
  uint64_t sizes = 0;  // hash of the sizes, in order
  char what[88] = {};  // for the receiver's error text

  Header(uint64_t tag_of_exchange, const std::string& label) : tag(tag_of_exchange) {
    std::snprintf(what, sizeof what, "%s", label.c_str());
  }
  void add(size_t message_bytes) {
    ++messages;
    bytes += message_bytes;
    sizes = mix(sizes, message_bytes);
  }
  bool agrees_with(const Header& other) const {
    return magic == other.magic && tag == other.tag && messages == other.messages && bytes == other.bytes &&
           sizes == other.sizes;
  }
};

// Payload of the same exchange and size may share a slot: there Gloo matches in order.
uint64_t payload_slot(uint64_t tag, size_t bytes) {
  return mix(mix(kHeaderSlot, tag), bytes) | (uint64_t{1} << 63);
}

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
    auto deadline = SteadyClock::now() + options.group.timeout;
    group_.store().watch([this](const std::string& cause) { group_failed(cause); },
                         [this] {
                           std::lock_guard lock(mutex_);
                           return where_;
                         });
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

  void exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                const ExchangeLabel& label) override {
    if (transfers.empty()) return;
    stream.submit([this, &transfers, &label] { run(transfers, label); });
  }

  void barrier() override {
    try {
      group_.barrier();
    } catch (const CommError& error) {
      give_up("at a barrier", error.what());
    }
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
  using Pending = ::gloo::transport::UnboundBuffer;

  // A transfer on its way, or a header when `bytes` is a header's.
  struct Posted {
    std::unique_ptr<Pending> buffer;
    Transfer::Kind kind = Transfer::Kind::send;
    int peer = 0;
    size_t bytes = 0;
    bool is_header = false;
    bool done = false;
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
      text += who_is_where();
    }
    std::lock_guard lock(mutex_);
    last_words_ = text;
    throw CommError(text);
  }

  // "; gone: rank 2; rank 3 is in allreduce of ...": who is not where this rank is, the first few of them.
  std::string who_is_where() {
    RollCall roll = group_.store().roll_call();
    std::string text = roll.absent();
    if (!text.empty()) text = "; " + text;
    std::lock_guard lock(mutex_);
    int told = 0;
    for (int r = 0; r < static_cast<int>(roll.ranks.size()); ++r) {
      const std::string& state = roll.ranks[r].state;
      if (roll.ranks[r].presence != RollCall::Presence::here || state.empty() || state == where_) continue;
      if (++told > 3) break;
      text += "; rank " + std::to_string(r) + " is " + state;
    }
    return text;
  }

  // Runs on the stream's thread.
  void run(const std::vector<Transfer>& transfers, const ExchangeLabel& label) {
    const auto deadline = SteadyClock::now() + group_.timeout();
    NoSigpipe guard;
    std::map<int, Header> expected, sent, arrived;
    for (const Transfer& t : transfers) {
      if (t.peer < 0 || t.peer >= world() || t.peer == rank()) {
        throw BadInput(label.what + ": rank " + std::to_string(rank()) + " cannot exchange with rank " +
                       std::to_string(t.peer));
      }
      auto& headers = t.kind == Transfer::Kind::send ? sent : expected;
      headers.try_emplace(t.peer, label.tag, label.what).first->second.add(t.bytes);
    }
    std::vector<Posted> posted;
    // Gloo's buffers may be destroyed while an operation on them is pending: it then leaves them alone.
    struct Active {
      GlooTransport* self;
      const std::string& what;
      ~Active() {
        std::lock_guard lock(self->mutex_);
        self->active_.clear();
        self->where_ = "not in a collective; its last was " + what;
      }
    };
    posted.reserve(transfers.size() + expected.size() + sent.size());
    std::unique_ptr<Active> active;  // goes before `posted`
    {
      std::lock_guard lock(mutex_);
      where_ = "in " + label.what;
      active.reset(new Active{this, label.what});
    }
    const Posted* at = nullptr;
    try {
      for (auto& [peer, header] : expected) {
        Header& incoming = arrived.try_emplace(peer, 0, "").first->second;
        post(posted, Transfer::Kind::receive, peer, &incoming, sizeof(Header), kHeaderSlot);
      }
      for (const Transfer& t : transfers) {
        if (t.kind == Transfer::Kind::receive && t.bytes > 0) {
          post(posted, t.kind, t.peer, t.data, t.bytes, payload_slot(label.tag, t.bytes));
        }
      }
      for (auto& [peer, header] : sent) {
        post(posted, Transfer::Kind::send, peer, &header, sizeof(Header), kHeaderSlot);
      }
      for (const Transfer& t : transfers) {
        if (t.kind == Transfer::Kind::send && t.bytes > 0) {
          post(posted, t.kind, t.peer, t.data, t.bytes, payload_slot(label.tag, t.bytes));
        }
      }
      size_t headers_in = expected.size();
      for (size_t i = 0; i < posted.size(); ++i) {
        at = &posted[i];
        wait(posted[i], deadline);
        posted[i].done = true;
        if (i < headers_in) compare(expected.at(posted[i].peer), arrived.at(posted[i].peer), posted[i].peer);
      }
    } catch (const Mismatch& mismatch) {
      give_up(label.what, mismatch.text);
    } catch (const std::exception& error) {
      std::string cause = failure();
      if (cause.empty() && SteadyClock::now() >= deadline) {
        cause = "no progress for " + std::to_string(group_.timeout().count()) + " ms";
      } else if (cause.empty()) {
        cause = "connection lost (" + without_location(error.what()) + ")";
      }
      give_up(label.what + ": " + pending_text(posted, at), cause);
    }
    for (const auto& [peer, header] : sent) bytes_sent_.fetch_add(header.bytes, std::memory_order_relaxed);
  }

  struct Mismatch {
    std::string text;
  };

  void post(std::vector<Posted>& posted, Transfer::Kind kind, int peer, void* data, size_t bytes,
            uint64_t slot) {
    Posted& p = posted.emplace_back();
    p.kind = kind;
    p.peer = peer;
    p.bytes = bytes;
    p.is_header = slot == kHeaderSlot;
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

  void compare(const Header& expected, const Header& arrived, int peer) const {
    if (expected.agrees_with(arrived)) return;
    std::string from = "rank " + std::to_string(peer);
    if (arrived.magic != kMagic)
      throw Mismatch{"what " + from + " sent is no header of Gradwire's: it is corrupted"};
    std::string theirs(arrived.what, strnlen(arrived.what, sizeof arrived.what));
    auto amount = [](const Header& h) {
      return std::to_string(h.bytes) + " bytes in " + std::to_string(h.messages) +
             (h.messages == 1 ? " message" : " messages");
    };
    bool alike = amount(expected) == amount(arrived) && std::string(expected.what) == theirs;
    throw Mismatch{"ranks disagree: rank " + std::to_string(rank()) + " expects " + amount(expected) +
                   " from " + from + ", which is in " + theirs + " and sends " + amount(arrived) +
                   (alike ? "; the calls differ in something else" : "")};
  }

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
             (at->is_header ? "" : std::to_string(at->bytes) + " bytes ") + (send ? "to" : "from") +
             " rank " + std::to_string(at->peer);
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
  // Destroyed in reverse: Gloo's threads end first, then the store.
  Membership group_;
  std::shared_ptr<::gloo::transport::Device> device_;
  std::shared_ptr<::gloo::transport::Context> context_;
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
