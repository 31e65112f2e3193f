#include "collectives/transport/tcp/tcp.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <numeric>
#include <set>

#include "collectives/net/joiner.h"
#include "collectives/net/message.h"
#include "collectives/net/quorum.h"
#include "collectives/net/secret.h"
#include "collectives/transport/regroup.h"
#include "collectives/transport/tcp/tcp_exchange.h"
#include "runtime/threads/resources.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/parse.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

using namespace tcp_messages;

class TcpTransport final : public Transport,
                           public EarlyExchange,
                           public MessagesToRankZero,
                           public ElasticGroup,
                           public Admission {
 public:
  // `enters`: the quorum belongs to this group at once; otherwise from enter_quorum() on.
  explicit TcpTransport(const TcpOptions& options, std::shared_ptr<Quorum> quorum = nullptr,
                        bool enters = true)
      : Transport("tcp", {options.group.rank, options.group.world, Device::host(), true}),
        options_(options),
        quorum_(std::move(quorum)),
        group_(options.group) {
    options_.group.callbacks.reset();  // its group may end before this one
    auto deadline = SteadyClock::now() + options.group.join_timeout();
    group_.store().watch([this](const std::string& cause) { group_failed(cause); },
                         [this] { return where(); });
    try {
      connect(options, deadline);
      group_.barrier();
    } catch (const Error& error) {
      give_up("joining", error.what());
    }
    if (enters) enter_quorum();
    std::lock_guard lock(mutex_);
    where_ = "not in a collective yet";
  }

  // Announces an orderly departure before hanging up.
  ~TcpTransport() override {
    if (quorum_ && entered_) quorum_->leave();
    group_.leave();
  }

  EarlyExchange* early_exchange() override { return this; }
  MessagesToRankZero* messages() override { return this; }
  ElasticGroup* elastic() override { return this; }
  Admission* admission() override { return this; }

  void begin_call(const Stream& stream, const Call& call) override {
    if (world() > 1) stream.submit([this, &call] { enter(call); });
  }

  void exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                const ExchangeLabel& label) override {
    if (transfers.empty()) return;
    stream.submit([this, &transfers, &label] {
      post_exchange(transfers, label);
      await_exchange();
    });
  }

  void begin_exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                      const ExchangeLabel& label) override {
    stream.submit([this, &transfers, &label] {
      post_exchange(transfers, label);
      links_->hand_over();
    });
  }

  void end_exchange(const Stream& stream) override {
    stream.submit([this] { await_exchange(); });
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

  // The first member notifies the others through this group's store, which has authenticated them.
  std::unique_ptr<Transport> split(const std::vector<int>& members) override {
    const int which = splits_++;
    if (members.empty()) return nullptr;
    const std::string key = fmt::format("split/{}/{}", which, members.front());
    const auto me = std::find(members.begin(), members.end(), rank());
    const auto read = [this, key, leader = members.front()] {
      return group_.store().get(
          key, SteadyClock::now() + options_.group.join_timeout(),
          fmt::format("rank {}, waiting for rank {} to split the group", rank(), leader));
    };
    TcpOptions options = options_;
    options.group.rendezvous = fmt::format("a split of {}", options_.group.rendezvous);
    options.group.callbacks = RendezvousCallbacks{
        .address = address_,
        .publish = [this, key](const std::string& text) { group_.store().set(key, text); },
        .read = read};
    options.group.rank = static_cast<int>(me - members.begin());
    options.group.world = static_cast<int>(members.size());
    return make_tcp_transport(options);
  }

  std::unique_ptr<Transport> regroup(milliseconds timeout, std::vector<int>& survivors) override {
    if (!options_.shrinkable) {
      throw BadInput(
          "the group was not made to go on without some of its ranks: see gw_comm_options.shrinkable");
    }
    if (!quorum_) throw BadInput("the ranks that are left of this group have formed a new one already");
    if (failure().empty()) abort("it is to go on with the ranks that are left");
    auto made = form_rest(*quorum_, options_.group, address_, timeout, survivors,
                          [this](const GroupOptions& rest, const std::vector<int>&) {
                            TcpOptions options = options_;
                            options.group = rest;
                            auto next = std::make_unique<TcpTransport>(options, quorum_);
                            next->options_.group.joining = options_.group.joining;
                            return next;
                          });
    quorum_ = nullptr;
    return made;
  }

  // ---- New ranks

  void open_admission(int most, std::function<std::string(const std::string&)> validate) override {
    if (!quorum_) throw BadInput("the group was not made to take new ranks");
    quorum_->admission().open(most, std::move(validate));
  }
  void close_admission() override {
    if (quorum_) quorum_->admission().close();
  }
  int waiting_joiners() const override { return quorum_ ? quorum_->admission().waiting() : 0; }

  std::string invitation() const override {
    if (!quorum_) return "";
    const std::string& own = options_.group.secret;
    const size_t known = own.empty() ? secret_from_environment().size() : own.size();
    return invitation_text(quorum_->key().substr(known), quorum_->contacts());
  }

  // The first rank invites the joiners and notifies the other ranks through this group's store. All ranks
  // form the new group while this one exists; it replaces this one if every rank has formed it.
  std::unique_ptr<Transport> grow() override {
    if (!quorum_) throw BadInput("the group was not made to take new ranks");
    const std::string key = fmt::format("grow/{}", growths_++);
    set_where("admitting new ranks");
    try {
      Quorum::NextGroup next;
      std::vector<AdmissionQueue::Joiner> joiners;
      if (rank() == 0) {
        joiners = quorum_->admission().invite();
        if (joiners.empty()) {
          group_.store().set(key, "");
        } else {
          next = quorum_->grown_by(joiners);
        }
      } else {
        const std::string text = group_.store().get(key, SteadyClock::now() + group_.timeout(),
                                                    "waiting for rank 0 to admit new ranks");
        if (!text.empty()) next = Quorum::NextGroup::decode(text, rank(), world());
      }
      std::unique_ptr<TcpTransport> made;
      if (!next.name.empty()) made = form(next, joiners, key);
      set_where("not in a collective; the last admitted new ranks");
      return made;
    } catch (const CommError& error) {
      give_up("admitting new ranks", error.what());
    }
  }

  void send_message(const std::string& message) override {
    try {
      group_.send_message(message);
    } catch (const CommError& error) {
      give_up("reporting to rank 0", error.what());
    }
  }

  std::string take_message(int from) override {
    try {
      return group_.take_message(from);
    } catch (const CommError& error) {
      give_up(fmt::format("waiting for rank {}'s report", from), error.what());
    }
  }

  void abort(const std::string& reason) override {
    {
      std::lock_guard lock(mutex_);
      if (!final_error_.empty()) return;  // the group has been notified
    }
    std::string cause = fmt::format("rank {} gave up: {}", rank(), reason);
    group_.store().report(cause);
    group_failed(cause);
  }

  void check() override {
    std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw CommError(fmt::format("rank {}: {}", rank(), failure_));
  }

 private:
  static constexpr const char* kWaiting = ", waiting for rank ";
  // How long survivors wait for each other to form a group before they start a new quorum, and how long they
  // wait for joiners, which have just answered.
  static constexpr milliseconds kFormAgain{5000}, kFormWithJoiners{3000};

  void enter_quorum() {
    if (!quorum_) return;
    entered_ = true;
    quorum_->enter(
        rank(), std::move(quorum_contacts_), [this](const std::string& why) { group_failed(why); },
        [this](const std::string& line) { return failure().empty() && group_.store().note(line); });
  }

  void set_where(const std::string& where) {
    std::lock_guard lock(mutex_);
    where_ = where;
  }

  // Runs this rank's part of forming the grown group. Returns null if some rank has not formed it.
  std::unique_ptr<TcpTransport> form(Quorum::NextGroup& next,
                                     const std::vector<AdmissionQueue::Joiner>& joiners,
                                     const std::string& key) {
    TcpOptions options = options_;
    options.group.rendezvous = "a group that takes new ranks";
    options.group.world = world() + static_cast<int>(next.joined.size());
    options.group.job = next.name;  // joiners may come from another job of the launcher
    options.group.joining = std::min(options_.group.join_timeout(), kFormWithJoiners);
    options.group.callbacks = RendezvousCallbacks{.address = address_,
                                                  .publish =
                                                      [&](const std::string& location) {
                                                        next.location = location;
                                                        group_.store().set(key, next.encode());
                                                        admit(joiners, next, world(), quorum_->number() + 1);
                                                      },
                                                  .read = [&next] { return next.location; }};
    for (const AdmissionQueue::Joiner& n : joiners) options.group.callbacks->invited.push_back(n.socket.fd());
    std::unique_ptr<TcpTransport> made;
    try {
      made = std::make_unique<TcpTransport>(options, quorum_, false);
      made->options_.group.joining = options_.group.joining;
    } catch (const std::exception& error) {
      // A joiner died, or the system refused a resource. A dead rank of this group is detected below.
      if (rank() == 0) {
        print_error_line(fmt::format("no new rank has joined, and the others go on: {}", text_of(error)));
      }
      if (rank() == 0 && next.location.empty()) {  // not published yet
        group_.store().set(key, "");
        return nullptr;
      }
    }
    group_.store().set(fmt::format("{}/{}", key, rank()), made ? "yes" : "no");
    const auto deadline = SteadyClock::now() + 2 * kFormAgain;
    bool all = true;
    for (int r = 0; r < world(); ++r) {
      const std::string has =
          group_.store().get(fmt::format("{}/{}", key, r), deadline,
                             fmt::format("waiting for rank {} to form a group with new ranks", r));
      all = all && has == "yes";
    }
    if (!all) return nullptr;
    quorum_->grow(next);
    made->enter_quorum();
    quorum_ = nullptr;
    return made;
  }

  void connect(const TcpOptions& options, SteadyClock::time_point deadline) {
    address_ = group_.listening_address(deadline);
    const PortRange ports = group_.options().ports;
    const bool verified = options.verify_payload || environment_flag("GRADWIRE_VERIFY_PAYLOAD");
    auto links = std::make_unique<TcpLinks>(rank(), world(), address_, group_.key(), verified, ports);
    TcpLinks* made = links.get();
    {
      std::lock_guard lock(mutex_);
      links_ = std::move(links);
      if (!failure_.empty()) throw CommError(failure_);
    }
    if (options.shrinkable && !quorum_) quorum_ = std::make_shared<Quorum>(address_, group_.key(), ports);
    Message mine;
    mine.add("links", made->contact()).add("quorum", quorum_ ? quorum_->contact() : "");
    group_.store().set(fmt::format("link/{}", rank()), mine.encode());
    std::vector<std::string> contacts;
    for (int r = 0; r < world(); ++r) {
      const auto theirs = Message::decode(group_.store().get(fmt::format("link/{}", r), deadline,
                                                             fmt::format("waiting for rank {} to join", r)));
      contacts.push_back(theirs.text("links"));
      quorum_contacts_.push_back(theirs.text("quorum"));
      if (quorum_ && quorum_contacts_.back().empty()) {
        throw CommError(
            fmt::format("rank {} is to go on without ranks that fail, rank {} is not: "
                        "gw_comm_options.shrinkable must be the same on every rank",
                        rank(), r));
      }
    }
    if (rank() > 0) contacts.front() = with_address(contacts.front(), group_.store().peer_address());
    made->connect(contacts, deadline, [this](const std::string& line) { group_.store().note(line); });
    for (int r = 0; quorum_ && r < world(); ++r) {
      if (r != rank()) quorum_->reached_at(quorum_contacts_[static_cast<size_t>(r)], made->address_of(r));
    }
  }

  // Wakes the exchange in progress. Called by the watcher's thread or by the thread that noticed the failure.
  void group_failed(const std::string& cause) {
    std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = cause;
    if (links_) links_->interrupt();
  }

  std::string failure() {
    std::lock_guard lock(mutex_);
    return failure_;
  }

  // Notifies the group, finds out which ranks still answer, and throws an error with everything known.
  [[noreturn]] void give_up(const std::string& doing, const std::string& cause) {
    std::string text = fmt::format("rank {}: {}: ", rank(), doing);
    const int waited_for = waiting_for_.load();
    {
      std::lock_guard lock(mutex_);
      if (!final_error_.empty()) throw CommError(text + "the group has failed before: " + final_error_);
    }
    text += cause;
    std::optional<std::string> first = group_.store().report(text);
    group_failed(first.value_or(text));
    if (!first) {
      text += "; no answer from rank 0, which runs the store";
    } else {
      if (*first != text && cause.find(*first) == std::string::npos) text += "; the first to fail: " + *first;
      text += who_is_where(waited_for);
    }
    std::lock_guard lock(mutex_);
    final_error_ = text;
    throw CommError(text);
  }

  // Returns this rank's state, for other ranks: "in call 17, allreduce of ..., waiting for rank 2".
  std::string where() {
    int peer = waiting_for_.load();
    std::lock_guard lock(mutex_);
    return peer < 0 ? where_ : fmt::format("{}{}{}", where_, kWaiting, peer);
  }

  // Returns "; gone: rank 2; rank 3 is in call 17, ..., waiting for rank 1; ...": first the ranks that do not
  // answer, then the chain of waits from this rank to the culprit, then other ranks.
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
      text += fmt::format("; rank {} is {}", r, state);
      return true;
    };
    for (int r = waited_for; r >= 0 && r < world && told.size() < 6 && tell(r);) {
      const std::string& state = roll.ranks[r].state;
      const size_t at = state.rfind(kWaiting);
      if (at == std::string::npos) break;
      r = parse_number<int>(state.substr(at + std::strlen(kWaiting))).value_or(-1);
    }
    for (int r = 0; r < world && told.size() < 5; ++r) tell(r);
    return text;
  }

  // From here to the end of await_exchange(): runs on the stream's thread.
  void enter(const Call& call) {
    if (unannounced_) {  // the previous call moved nothing; compare its header now
      post_exchange({}, {0, call_.what});
      await_exchange();
    }
    call_ = call;
    ++sequence_;
    rolling_ = mix(rolling_, call.hash);
    unannounced_ = true;
  }

  // Returns this rank's activity, for error texts: "call 17, allreduce of ...".
  std::string named(const std::string& what) const {
    return sequence_ == 0 ? what : fmt::format("call {}, {}", sequence_, what);
  }

  void post_exchange(const std::vector<Transfer>& transfers, const ExchangeLabel& label) {
    const uint64_t tag = mix(rolling_, label.tag);
    InFlight& e = *in_flight_.emplace_back(std::make_unique<InFlight>());
    e.here = named(label.what);
    for (const Transfer& t : transfers) {
      if (t.peer < 0 || t.peer >= world() || t.peer == rank()) {
        in_flight_.pop_back();
        throw BadInput(fmt::format("{}: rank {} cannot exchange with rank {}", label.what, rank(), t.peer));
      }
      if (t.kind == Transfer::Kind::send) e.bytes += t.bytes;
      if (sequence_ > 0) continue;  // the call's header covers all its exchanges
      auto& headers = t.kind == Transfer::Kind::send ? e.sent : e.expected;
      headers.try_emplace(t.peer, tag, e.here).first->second.add(t.bytes);
    }
    e.posted.reserve(transfers.size() + e.expected.size() + e.sent.size() + 2);
    {
      std::lock_guard lock(mutex_);
      if (in_flight_.size() == 1) where_ = "in " + e.here;
    }
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

  void await_exchange() {
    if (in_flight_.empty()) throw CommError("the group has failed before: " + failure());
    InFlight& e = *in_flight_.front();
    const auto deadline = SteadyClock::now() + group_.timeout();
    const Posted* at = nullptr;
    try {
      for (Posted& p : e.posted) {
        at = &p;
        waiting_for_ = p.peer;
        if (p.sent) {
          wait(p, deadline);
        } else {
          waits_.measure([&] { return wait(p, deadline), p.peer; });
        }
        if (p.sent) continue;
        if (p.tag == kCallSlot) compare(e.mine, e.previous, rank(), p.peer);
        if (p.tag == kHeaderSlot) compare(e.expected.at(p.peer), e.arrived.at(p.peer), rank(), p.peer);
      }
    } catch (const std::exception& error) {
      fail(e, at, error, deadline);
    }
    count_sent(e.bytes);
    leave();
    in_flight_.pop_front();
    if (!in_flight_.empty()) links_->hand_over();
  }

  // Called when the oldest exchange in flight is done.
  void leave() {
    waiting_for_ = -1;
    std::lock_guard lock(mutex_);
    where_ = in_flight_.size() > 1 ? "in " + in_flight_[1]->here
                                   : "not in a collective; its last was " + in_flight_[0]->here;
  }

  // Throws the error of exchange `e`, which failed while waiting for `at`, or while posting if `at` is null.
  [[noreturn]] void fail(const InFlight& e, const Posted* at, const std::exception& error,
                         SteadyClock::time_point deadline) {
    struct Cleared {
      TcpTransport* self;
      ~Cleared() {
        self->waiting_for_ = -1;
        self->links_->drop();
        {
          std::lock_guard lock(self->mutex_);
          self->where_ = "not in a collective; its last was " + self->in_flight_.front()->here;
        }
        self->in_flight_.clear();
      }
    } cleared{this};
    if (const auto* mismatch = dynamic_cast<const Mismatch*>(&error)) give_up(e.here, mismatch->what());
    std::string cause = failure();
    if (cause.empty() && SteadyClock::now() >= deadline) {
      cause = fmt::format("not done after {} ms", group_.timeout().count());
    } else if (cause.empty()) {
      cause = fmt::format("connection lost ({})", error.what());
    }
    give_up(fmt::format("{}: {}", e.here, pending_text(e.posted, at)), cause);
  }

  void post(InFlight& e, Transfer::Kind kind, int peer, void* data, size_t bytes, uint64_t slot) {
    Posted& p = e.posted.emplace_back();
    p.sent = kind == Transfer::Kind::send;
    p.peer = peer;
    p.data = data;
    p.bytes = bytes;
    p.tag = slot;
    links_->post(p);
  }

  void wait(Posted& p, SteadyClock::time_point deadline) {
    if (!links_->wait(p, deadline)) throw CommError("not done in time");
  }

  TcpOptions options_;
  std::string address_;                       // where this rank listens; empty: at all addresses of this host
  std::shared_ptr<Quorum> quorum_;            // of a shrinkable group; passed on to the next group
  std::vector<std::string> quorum_contacts_;  // contacts by rank, until the group has formed
  bool entered_ = false;                      // the quorum belongs to this group
  int splits_ = 0, growths_ = 0;
  std::mutex mutex_;
  std::string failure_;      // the first failure this rank received
  std::string final_error_;  // thrown by give_up()
  std::string where_ = "joining";
  std::atomic<int> waiting_for_{-1};
  // The current call. Used only by the thread that runs exchanges.
  Call call_;
  uint64_t sequence_ = 0, rolling_ = 0;
  bool unannounced_ = false;                         // nothing of this call has been sent
  std::deque<std::unique_ptr<InFlight>> in_flight_;  // in start order
  // Destroyed in reverse order: first the group, whose thread may interrupt the links; then the links, whose
  // thread may use what is in flight.
  std::unique_ptr<TcpLinks> links_;
  Membership group_;
};

}  // namespace

std::unique_ptr<Transport> make_tcp_transport(const TcpOptions& options) {
  return std::make_unique<TcpTransport>(options);
}

std::unique_ptr<Transport> join_tcp_transport(const TcpOptions& asked, const TcpJoinOptions& join) {
  TcpOptions joining = asked;
  read_listening(joining.group);
  const Admitted admitted = request_admission({.invitation = join.invitation,
                                               .secret = joining.group.secret,
                                               .about = join.about,
                                               .interface = joining.group.interface,
                                               .ports = joining.group.ports,
                                               .patience = joining.group.join_timeout(),
                                               .longest = join.longest});
  TcpOptions options = joining;
  options.shrinkable = true;
  options.group.rendezvous = "a group that takes new ranks";
  options.group.rank = admitted.rank;
  options.group.world = admitted.world;
  options.group.job = admitted.name;
  options.group.callbacks = RendezvousCallbacks{.address = admitted.quorum->address(),
                                                .publish = nullptr,
                                                .read = [&] { return admitted.location; },
                                                .invited = {},
                                                .given_up = [&] { return admitted.host.hung_up(); }};
  auto joined = std::make_unique<TcpTransport>(options, admitted.quorum);
  say_joined(admitted);
  return joined;
}

}  // namespace gradwire
