#include "collectives/transport/tcp/tcp.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "collectives/net/quorum.h"
#include "collectives/transport/tcp/tcp_links.h"
#include "runtime/threads/thread.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/hash.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

// How long ranks wait for joiners, which have just answered, and for each other's word that the grown group
// has formed.
constexpr milliseconds kFormWithJoiners{3000}, kFormedEverywhere{10'000};
constexpr const char* kAdmitting = "admitting new ranks";

// A payload's tag is derived from calls, exchange and size: payload of another call or size matches no
// receive and stays on its connection. Payloads of the same exchange and size may share a tag: messages of
// one connection are matched in order.
constexpr uint64_t kPayloadSlot = 1, kCallSlot = 2;

// Precedes the payloads of a call, from each rank to the next rank (rank + 1). It identifies the call by a
// hash over this call and all previous calls, including their schedules. If any two ranks differ, some rank
// differs from its neighbour, whichever schedules they follow.
struct CallHeader {
  static constexpr uint64_t kMagic = 0x32657269'77647267ull;
  uint64_t magic = kMagic;
  uint64_t sequence = 0;
  uint64_t rolling = 0;  // hash of all calls up to and including the current call
  char what[168] = {};   // the call, for the receiver's error text

  std::string text() const { return {what, strnlen(what, sizeof what)}; }
};

// Thrown if two ranks make different calls.
struct Mismatch : Error {
  using Error::Error;
};

// The transport of one rank. One thread at a time may make calls; the failure's functions run on any thread.
class TcpTransport final : public Transport {
 public:
  // Joins the group. `quorum`: the quorum of the previous group, if this group continues that quorum.
  // `enters`: the quorum belongs to this group at once; otherwise the quorum belongs to this group from
  // enter_quorum() on.
  explicit TcpTransport(const TcpOptions& options, std::shared_ptr<Quorum> quorum = nullptr,
                        bool enters = true)
      : Transport("tcp",
                  {options.group.rank, options.group.world, Device::host(), true, options.group.timeout}),
        options_(options),
        quorum_(std::move(quorum)),
        group_(options.group) {
    options_.group.callbacks.reset();  // the group of the callbacks may end before this group
    const auto deadline = SteadyClock::now() + options.group.join_timeout();
    group_.store().watch([this](const std::string& cause) { record(cause); }, [this] { return activity(); });
    try {
      connect(deadline);
      group_.barrier();
    } catch (const Error& error) {
      give_up("joining", error.what());
    } catch (const std::bad_alloc&) {  // the other ranks must not wait for this rank
      abort("out of host memory");
      throw;
    }
    if (enters) enter_quorum();
    set_activity("not in a collective yet");
  }

  // Announces an orderly departure before closing the connections.
  ~TcpTransport() override {
    if (quorum_ && entered_) quorum_->leave();
    group_.leave();
  }

  // ---- Calls and exchanges

  void begin_call(const Stream& stream, const Call& call) override {
    if (world() == 1) return;
    stream.submit([this, &call] {
      if (unannounced_) {  // the previous call moved no data; compare the previous call's header now
        post({}, {0, call_.what});
        await_oldest();
      }
      call_ = call;
      ++calls_;
      rolling_ = mix(rolling_, call.hash);
      unannounced_ = true;
    });
  }

  void exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                const ExchangeLabel& label) override {
    if (transfers.empty()) return;
    stream.submit([this, &transfers, &label] {
      post(transfers, label);
      await_oldest();
    });
  }

  bool has_early_exchange() const override { return true; }
  void begin_exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                      const ExchangeLabel& label) override {
    stream.submit([this, &transfers, &label] {
      post(transfers, label);
      links_->hand_over();
    });
  }
  void end_exchange(const Stream& stream) override {
    stream.submit([this] { await_oldest(); });
  }

  void barrier() override {
    set_activity("at a barrier");
    or_give_up("at a barrier", [&] { group_.barrier(); });
    set_activity("not in a collective; its last was a barrier");
  }

  void send_message(const std::string& message) override {
    or_give_up("reporting to rank 0", [&] { group_.store().send_message(message); });
  }
  std::string take_message(int from) override {
    return or_give_up(fmt::format("waiting for rank {}'s report", from),
                      [&] { return group_.take_message(from); });
  }

  // ---- Failure

  // Fails the group for `reason`.
  void abort(const std::string& reason) override {
    if (std::lock_guard lock(mutex_); !final_error_.empty()) return;  // the group has been notified
    const std::string cause = fmt::format("rank {} gave up: {}", rank(), reason);
    group_.store().report(cause);
    record(cause);
  }

  void check() override {
    std::lock_guard lock(mutex_);
    require<CommError>(failure_.empty(), "rank {}: {}", rank(), failure_);
  }

  // ---- Other groups

  // Returns the group of `members`. The first member notifies the other members through this group's store,
  // which has authenticated them.
  std::unique_ptr<Transport> split(const std::vector<int>& members) override {
    const int number = splits_++;
    if (members.empty()) return nullptr;
    const std::string key = fmt::format("split/{}/{}", number, members.front());
    TcpOptions options = options_;
    options.link = links_->emulated();  // so that all groups change their rate at one time
    options.group.rendezvous = fmt::format("a split of {}", options_.group.rendezvous);
    RendezvousCallbacks& callbacks = options.group.callbacks.emplace();
    callbacks.address = address_;
    callbacks.publish = [&](const std::string& location) { group_.store().set(key, location); };
    callbacks.read = [&] {
      return group_.store().get(
          key, SteadyClock::now() + options_.group.join_timeout(),
          fmt::format("rank {}, waiting for rank {} to split the group", rank(), members.front()));
    };
    options.group.rank =
        static_cast<int>(std::find(members.begin(), members.end(), rank()) - members.begin());
    options.group.world = static_cast<int>(members.size());
    return std::make_unique<TcpTransport>(options);
  }

  std::unique_ptr<Transport> regroup(milliseconds timeout, std::vector<int>& survivors) override {
    require_regroupable(options_.shrinkable, quorum_ != nullptr);
    if (recorded().empty()) abort("the group continues with the ranks that are left");
    auto made = regroup_survivors(*quorum_, options_.group, address_, timeout, survivors,
                                  [this](const GroupOptions& group, const std::vector<int>&) {
                                    TcpOptions options = options_;
                                    options.group = group;
                                    auto next = std::make_unique<TcpTransport>(options, quorum_);
                                    next->options_.group.joining = options_.group.joining;
                                    return next;
                                  });
    quorum_ = nullptr;
    return made;
  }

  bool admits() const override { return true; }
  void open_admission(int most, std::function<std::string(const std::string&)> validate) override {
    require_quorum();
    quorum_->admission().open(most, std::move(validate));
  }
  void close_admission() override {
    if (quorum_) quorum_->admission().close();
  }
  int waiting_joiners() const override { return quorum_ ? quorum_->admission().waiting() : 0; }
  std::string invitation() const override {
    if (!quorum_) return "";
    const std::string& given = options_.group.secret;
    const std::string drawn =
        quorum_->key().substr(given.empty() ? secret_from_environment().size() : given.size());
    return (drawn.empty() ? "-" : drawn) + "\n" + quorum_->contacts();
  }

  // Returns the grown group, or null if it has not formed. Rank 0 invites the joiners and notifies the other
  // ranks through this group's store; an empty text means that there are no joiners. All ranks form the new
  // group while the old group exists. The new group replaces the old group if every rank has formed the new
  // group.
  std::unique_ptr<Transport> grow() override {
    require_quorum();
    const std::string key = fmt::format("grow/{}", growths_++);
    set_activity(kAdmitting);
    return or_give_up(kAdmitting, [&]() -> std::unique_ptr<TcpTransport> {
      std::vector<AdmissionQueue::Joiner> joiners;
      Quorum::NextGroup next;
      if (rank() != 0) {
        const std::string text =
            group_.store().get(key, SteadyClock::now() + timeout(), "waiting for rank 0 to admit new ranks");
        if (!text.empty()) next = Quorum::NextGroup::decode(text, rank(), world());
      } else if (joiners = quorum_->admission().invite(); !joiners.empty()) {
        next = quorum_->grown_by(joiners);
      } else {
        group_.store().set(key, "");
      }
      std::unique_ptr<TcpTransport> made;
      if (!next.name.empty()) made = form(next, joiners, key);
      set_activity("not in a collective; the last admitted new ranks");
      return made;
    });
  }

 private:
  // An exchange in flight. The object must not move, because the links hold pointers to its messages.
  struct InFlight {
    std::string doing;  // "call 17, allreduce of ..., round 3 of 6"
    CallHeader mine, previous;
    std::vector<TcpLinks::Message> posted;
    uint64_t bytes = 0;  // number of payload bytes to send
  };

  // Connects to every rank. The ranks publish the contacts of their links and quorums in the store.
  void connect(SteadyClock::time_point deadline) {
    address_ = group_.listening_address(deadline);
    auto links = std::make_unique<TcpLinks>(rank(), world(), address_, group_.key(),
                                            environment_flag("GRADWIRE_VERIFY_PAYLOAD"),
                                            group_.options().ports, options_.link);
    {
      std::lock_guard lock(mutex_);
      links_ = std::move(links);
      if (!failure_.empty()) throw CommError(failure_);
    }
    if (options_.shrinkable && !quorum_) {
      quorum_ = std::make_shared<Quorum>(address_, group_.key(), group_.options().ports);
    }
    StoreClient& store = group_.store();
    Message mine;
    mine.add("links", links_->contact()).add("quorum", quorum_ ? quorum_->contact() : "");
    store.set(fmt::format("link/{}", rank()), mine.encode());
    std::vector<std::string> contacts;
    for (int r = 0; r < world(); ++r) {
      const auto theirs = Message::decode(
          store.get(fmt::format("link/{}", r), deadline, fmt::format("waiting for rank {} to join", r)));
      contacts.push_back(theirs.text("links"));
      contacts_.push_back(theirs.text("quorum"));
      if (quorum_) require_contact(rank(), r, contacts_.back());
    }
    // The address at which this process has reached rank 0's store may differ from rank 0's addresses if a
    // container's ports are forwarded. It is the last to try.
    if (const std::string reached = store.peer_address();
        rank() > 0 && !reached.empty() && !is_loopback(reached)) {
      auto zero = Contact::parse(contacts.front());
      if (zero && std::count(zero->addresses.begin(), zero->addresses.end(), reached) == 0) {
        zero->addresses.push_back(reached);
        contacts.front() = zero->text();
      }
    }
    links_->connect(contacts, deadline, [&store](const std::string& line) { store.note(line); });
    for (int r = 0; quorum_ && r < world(); ++r) {
      if (r != rank()) quorum_->reached_at(contacts_[static_cast<size_t>(r)], links_->address_of(r));
    }
  }

  // Enters the group in this process's quorum, if there is one.
  void enter_quorum() {
    if (!quorum_) return;
    entered_ = true;
    quorum_->enter(
        rank(), std::move(contacts_), [this](const std::string& why) { record(why); },
        [this](const std::string& line) { return recorded().empty() && group_.store().note(line); });
  }

  void require_quorum() const {
    require(quorum_ != nullptr,
            "the group was not created to admit new ranks; set gw_comm_options.shrinkable");
  }

  // Posts an exchange. At most two may be in flight.
  void post(const std::vector<Transfer>& transfers, const ExchangeLabel& label) {
    using Kind = Transfer::Kind;
    const uint64_t tag = mix(rolling_, label.tag);
    InFlight& e = *in_flight_.emplace_back(std::make_unique<InFlight>());
    e.doing = calls_ == 0 ? label.what : fmt::format("call {}, {}", calls_, label.what);
    for (const Transfer& t : transfers) {
      if (t.peer < 0 || t.peer >= world() || t.peer == rank()) {
        in_flight_.pop_back();
        throw BadInput("{}: rank {} cannot exchange with rank {}", label.what, rank(), t.peer);
      }
      if (t.kind == Kind::send) e.bytes += t.bytes;
    }
    e.posted.reserve(transfers.size() + 2);
    if (in_flight_.size() == 1) set_activity("in " + e.doing);
    const auto add = [&](Kind kind, int peer, void* data, size_t bytes, uint64_t slot) {
      TcpLinks::Message& message = e.posted.emplace_back();
      message.sent = kind == Kind::send;
      message.peer = peer;
      message.data = data;
      message.bytes = bytes;
      message.tag = slot;
      links_->post(message);
    };
    try {
      if (std::exchange(unannounced_, false)) {
        e.mine.sequence = calls_;
        e.mine.rolling = rolling_;
        call_.what.copy(e.mine.what, sizeof e.mine.what - 1);
        add(Kind::receive, (rank() + world() - 1) % world(), &e.previous, sizeof e.previous, kCallSlot);
        add(Kind::send, (rank() + 1) % world(), &e.mine, sizeof e.mine, kCallSlot);
      }
      for (const Kind kind : {Kind::receive, Kind::send}) {
        for (const Transfer& t : transfers) {
          if (t.kind != kind || t.bytes == 0) continue;
          add(kind, t.peer, t.data, t.bytes, mix(mix(kPayloadSlot, tag), t.bytes) | (uint64_t{1} << 63));
        }
      }
    } catch (const std::exception& error) {
      fail(e, nullptr, error, SteadyClock::time_point::max());
    }
  }

  // Blocks until the oldest exchange is done. Counts its payload as sent.
  void await_oldest() {
    if (in_flight_.empty()) throw CommError("the group has failed: " + recorded());
    InFlight& e = *in_flight_.front();
    const auto deadline = SteadyClock::now() + timeout();
    const TcpLinks::Message* at = nullptr;
    try {
      for (TcpLinks::Message& message : e.posted) {
        at = &message;
        waiting_for_ = message.peer;
        const auto wait = [&] {
          if (!links_->wait(message, deadline)) throw CommError("not done in time");
          return message.peer;
        };
        if (message.sent) {
          wait();
          continue;
        }
        waits_.measure(wait);
        if (message.tag == kCallSlot) compare(e.mine, e.previous, message.peer);
      }
    } catch (const std::exception& error) {
      fail(e, at, error, deadline);
    }
    waiting_for_ = -1;
    set_activity(in_flight_.size() > 1 ? "in " + in_flight_[1]->doing
                                       : "not in a collective; its last was " + e.doing);
    count_sent(e.bytes);
    in_flight_.pop_front();
    if (!in_flight_.empty()) links_->hand_over();
  }

  // Throws Mismatch, which names both ranks and their calls, unless this rank and `peer` make the same call.
  void compare(const CallHeader& mine, const CallHeader& theirs, int peer) const {
    require<Mismatch>(theirs.magic == CallHeader::kMagic,
                      "the message from rank {} is not a Gradwire header: it is corrupted", peer);
    if (mine.sequence == theirs.sequence && mine.rolling == theirs.rolling) return;
    const bool alike = mine.sequence == theirs.sequence && mine.text() == theirs.text();
    throw Mismatch("ranks disagree: rank {} makes call {}, {}; rank {} makes call {}, {}{}", rank(),
                   mine.sequence, mine.text(), peer, theirs.sequence, theirs.text(),
                   alike ? "; this call or an earlier one differs in something else" : "");
  }

  // Returns "waiting to receive 4096 bytes from rank 0 (3 receives and 2 sends pending, with ranks 0, 2)".
  // `at`: the message for which the exchange waits; null while posting.
  static std::string pending(const std::vector<TcpLinks::Message>& posted, const TcpLinks::Message* at) {
    std::string text;
    if (at == nullptr) {
      if (posted.empty()) return "before the first transfer";
      const TcpLinks::Message& last = posted.back();
      text = fmt::format("starting to {} rank {}", last.sent ? "send to" : "receive from", last.peer);
    } else if (at->tag == kCallSlot && !at->sent) {
      text = fmt::format("waiting for rank {} to begin it", at->peer);
    } else {
      text = fmt::format("waiting to {} {}{} rank {}", at->sent ? "send" : "receive",
                         at->tag == kCallSlot ? "" : fmt::format("{} bytes ", at->bytes),
                         at->sent ? "to" : "from", at->peer);
    }
    int receives = 0, sends = 0;
    std::set<int> peers;
    for (const TcpLinks::Message& message : posted) {
      if (message.done) continue;
      ++(message.sent ? sends : receives);
      peers.insert(message.peer);
    }
    return fmt::format("{} ({} receives and {} sends pending, with ranks {})", text, receives, sends,
                       fmt::join(peers, ", "));
  }

  // Throws the error of exchange `e`, which failed while waiting for the message `at`, or while posting if
  // `at` is null.
  [[noreturn]] void fail(const InFlight& e, const TcpLinks::Message* at, const std::exception& error,
                         SteadyClock::time_point deadline) {
    std::string last;
    try {
      last = "not in a collective; its last was " + e.doing;
      if (dynamic_cast<const Mismatch*>(&error) != nullptr) give_up(e.doing, error.what());
      std::string cause = recorded();
      if (cause.empty() && SteadyClock::now() >= deadline) {
        cause = fmt::format("not done after {} ms{}", timeout().count(), links_->over_links());
      } else if (cause.empty()) {
        cause = fmt::format("connection lost ({})", error.what());
      }
      give_up(fmt::format("{}: {}", e.doing, pending(e.posted, at)), cause);
    } catch (...) {  // must not allocate
      waiting_for_ = -1;
      links_->drop();
      if (!last.empty()) set_activity(std::move(last));
      in_flight_.clear();
      throw;
    }
  }

  // Sets this rank's activity, for other ranks' errors: "in call 17, allreduce of ..."
  void set_activity(std::string activity) {
    std::lock_guard lock(mutex_);
    activity_ = std::move(activity);
  }
  // Returns the activity and the awaited rank: "in call 17, allreduce of ..., waiting for rank 2".
  std::string activity() {
    const int peer = waiting_for_;
    std::lock_guard lock(mutex_);
    return peer < 0 ? activity_ : fmt::format("{}{}{}", activity_, RollCall::kWaiting, peer);
  }

  // Records that the group has failed, and interrupts this rank.
  void record(const std::string& cause) {
    std::lock_guard lock(mutex_);
    if (links_) links_->interrupt();  // first, because the copy may be refused memory
    if (failure_.empty()) failure_ = cause;
  }
  // Returns the first failure that this rank has recorded; "" if no failure is recorded.
  std::string recorded() {
    std::lock_guard lock(mutex_);
    return failure_;
  }

  // Runs `body`. A CommError gives up.
  template <typename Body>
  auto or_give_up(const std::string& doing, Body body) -> decltype(body()) {
    try {
      return body();
    } catch (const CommError& error) {
      give_up(doing, error.what());
    }
  }

  // Notifies the group, finds out which ranks still answer, and throws an error with all known facts.
  // `doing`: this rank's activity, for the error.
  [[noreturn]] void give_up(const std::string& doing, const std::string& cause) {
    std::string text = fmt::format("rank {}: {}: ", rank(), doing);
    const int waited_for = waiting_for_;
    if (std::lock_guard lock(mutex_); !final_error_.empty()) {
      throw CommError(text + "the group has failed: " + final_error_);
    }
    text += cause;
    const std::optional<std::string> first = group_.store().report(text);
    record(first.value_or(text));
    if (!first) {
      text += "; no answer from rank 0, which runs the store";
    } else {
      if (*first != text && cause.find(*first) == std::string::npos) text += "; the first to fail: " + *first;
      text += group_.store().roll_call().activities(rank(), waited_for);
    }
    std::lock_guard lock(mutex_);
    final_error_ = text;
    throw CommError(text);
  }

  // Runs this rank's part of forming the grown group. Returns null if some rank has not formed the grown
  // group.
  std::unique_ptr<TcpTransport> form(Quorum::NextGroup& next,
                                     const std::vector<AdmissionQueue::Joiner>& joiners,
                                     const std::string& key) {
    StoreClient& store = group_.store();
    TcpOptions options = options_;
    options.group.rendezvous = "a group that takes new ranks";
    options.group.world = world() + static_cast<int>(next.joined.size());
    options.group.job = next.name;  // joiners may come from another job of the launcher
    options.group.joining = std::min(options_.group.join_timeout(), kFormWithJoiners);
    RendezvousCallbacks& callbacks = options.group.callbacks.emplace();
    callbacks.address = address_;
    callbacks.publish = [&](const std::string& location) {
      next.location = location;
      store.set(key, next.encode());
      admit(joiners, next, world(), quorum_->number() + 1);
    };
    callbacks.read = [&] { return next.location; };
    for (const auto& joiner : joiners) callbacks.invited.push_back(joiner.socket.fd());
    std::unique_ptr<TcpTransport> made;
    try {
      made = std::make_unique<TcpTransport>(options, quorum_, false);
      made->options_.group.joining = options_.group.joining;
    } catch (const std::exception& error) {
      // A joiner died, or the system refused a resource. A dead rank of this group is detected below.
      if (rank() == 0) {
        print_error_line(fmt::format("no new rank has joined; the group continues: {}", text_of(error)));
      }
      if (rank() == 0 && next.location.empty()) {  // rank 0 has not published the group yet
        store.set(key, "");
        return nullptr;
      }
    }
    store.set(fmt::format("{}/{}", key, rank()), made ? "yes" : "no");
    const auto deadline = SteadyClock::now() + kFormedEverywhere;
    bool everywhere = true;
    for (int r = 0; r < world(); ++r) {
      const std::string formed =
          store.get(fmt::format("{}/{}", key, r), deadline,
                    fmt::format("waiting for rank {} to form a group with new ranks", r));
      everywhere = everywhere && formed == "yes";
    }
    if (!everywhere) return nullptr;
    quorum_->adopt(next);
    made->enter_quorum();
    quorum_ = nullptr;
    return made;
  }

  TcpOptions options_;
  std::string address_;  // where this rank listens; empty: all addresses of this host
  int splits_ = 0, growths_ = 0;

  std::mutex mutex_;         // guards the members up to activity_, and links_ until it is set
  std::string failure_;      // the first failure that this rank has recorded
  std::string final_error_;  // the error that give_up() throws
  std::string activity_ = "joining";
  std::atomic<int> waiting_for_{-1};  // the rank that this rank waits for; -1: none

  Call call_;  // the current call
  uint64_t calls_ = 0, rolling_ = 0;
  bool unannounced_ = false;                         // no message of the current call has been sent
  std::deque<std::unique_ptr<InFlight>> in_flight_;  // in the order in which the exchanges were posted
  // Members are destroyed in reverse order: first the group, whose thread may record a failure and interrupt
  // the links, then the links, whose thread may use the exchanges in flight.
  std::unique_ptr<TcpLinks> links_;
  // Null if the group is not shrinkable, or once the next group has taken the quorum.
  std::shared_ptr<Quorum> quorum_;
  std::vector<std::string> contacts_;  // the quorums' contacts by rank, until the group has formed
  bool entered_ = false;               // the quorum belongs to this group
  Membership group_;
};

}  // namespace

std::unique_ptr<Transport> make_tcp_transport(const TcpOptions& options) {
  return std::make_unique<TcpTransport>(options);
}

std::unique_ptr<Transport> join_tcp_transport(const TcpOptions& asked, const JoinRequest& join) {
  TcpOptions options = asked;
  read_listening(options.group);
  const Admitted admitted = request_admission(options.group, join);
  options.shrinkable = true;
  options.group.rendezvous = "a group that takes new ranks";
  options.group.rank = admitted.rank;
  options.group.world = admitted.world;
  options.group.job = admitted.name;
  RendezvousCallbacks& callbacks = options.group.callbacks.emplace();
  callbacks.address = admitted.quorum->address();
  callbacks.read = [&] { return admitted.location; };
  callbacks.given_up = [&] { return admitted.host.hung_up(); };
  auto joined = std::make_unique<TcpTransport>(options, admitted.quorum);
  send_frame(admitted.host, {Frame::Op::joined, 0, "", ""}, SteadyClock::now() + Quorum::kPatience);
  return joined;
}

}  // namespace gradwire
