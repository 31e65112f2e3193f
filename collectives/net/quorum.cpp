#include "collectives/net/quorum.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <iterator>
#include <numeric>
#include <thread>
#include <utility>

#include "collectives/net/handshake.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"

namespace gradwire {
namespace {

using Op = Frame::Op;
using std::chrono::milliseconds;

constexpr milliseconds kTick{200};  // poll interval; limits the delay of joiners' wait messages

}  // namespace

Quorum::Listener::Listener(const std::string& at, const std::string& key, const PortRange& ports)
    : address(at),
      name(random_secret()),
      credentials{key, purpose_of(name)},
      socket(listen_within(ports, at)) {}

Quorum::Quorum(const std::string& address, const std::string& key, const PortRange& ports)
    : listener_(address, key, ports) {
  thread_ = Thread("the thread that answers other ranks", [this] { serve(); });
}

Quorum::~Quorum() {
  listener_.stop = true;
  listener_.wake.set();
  thread_.join();
}

std::string Quorum::contact() const {
  return contact_of(listener_.socket, listener_.address, listener_.name).text();
}

void Quorum::enter(int rank, std::vector<std::string> contacts,
                   std::function<void(const std::string&)> failed,
                   std::function<bool(const std::string&)> note) {
  std::scoped_lock lock(calling_, mutex_);
  group_.rank = rank;
  group_.contacts = std::move(contacts);
  owner_ = {std::move(failed), std::move(note)};
  failure_reported_ = false;  // a reported failure belongs to the previous group
  forming_.followers.clear();
  if (forming_.announcer) {
    send_frame(forming_.announcer, {Op::joined, 0, "", ""}, patience_end());
    forming_.announcer.close();
  }
}

void Quorum::leave() {
  std::lock_guard lock(calling_);
  owner_ = {};
}

// ---- The serving thread ----

void Quorum::serve() {
  while (!listener_.stop) {
    try {
      return serve_until_stopped();
    } catch (const std::exception&) {  // retry once memory is available
      std::this_thread::sleep_for(kTick);
    }
  }
}

void Quorum::serve_until_stopped() {
  while (true) {
    std::vector<pollfd> entries = {{listener_.wake.fd(), POLLIN, 0}};
    size_t ranks = 0;
    {
      std::lock_guard lock(mutex_);
      for (const Caller& c : callers_) entries.push_back({c.socket.fd(), POLLRDHUP, 0});
      ranks = group_.contacts.size();
    }
    admission_.add_entries(entries);
    listener_.pending.add_entries(entries);
    poll(entries.data(), entries.size(), static_cast<int>(kTick.count()));
    if (listener_.stop) return;
    remove_lost_callers();
    for (auto& caller : listener_.pending.advance(entries, ranks)) {
      try {
        answer(std::move(caller));
      } catch (const CommError&) {  // the caller is not a rank; hang up
      }
    }
    admission_.update();
    changed_.notify_all();
    notify_owner(listener_.pending.take_log());
  }
}

void Quorum::remove_lost_callers() {
  std::lock_guard lock(mutex_);
  std::erase_if(callers_, [&](const Caller& c) {
    const bool lost = c.socket.hung_up();
    round_.lost_caller = round_.lost_caller || (lost && c.rank >= 0);
    return lost;
  });
}

// Reports rejected connections and the failure of the group to the owner. Runs without the mutex, because
// rank 0 may be slow to answer.
void Quorum::notify_owner(const std::vector<std::string>& log) {
  const auto state = [&] {
    std::lock_guard lock(mutex_);
    return std::pair(group_.rank, failure_reported_);
  };
  const auto [rank, reported] = state();
  if (!reported && log.empty()) return;
  std::lock_guard calling(calling_);
  for (const std::string& line : log) {
    if (owner_.note && owner_.note(line)) continue;
    print_error_line(fmt::format("rank {} {}", rank, line));
  }
  if (!state().second) return;  // this process has already entered the next group
  {
    std::lock_guard lock(mutex_);
    failure_reported_ = false;
  }
  if (owner_.failed) owner_.failed("another rank has found that the group has failed");
}

void Quorum::answer(PendingCallers::Caller caller) {
  if (caller.first.op != Op::request) return answer_rank(std::move(caller));
  std::lock_guard lock(mutex_);
  const Message request = Message::decode(caller.first.value);
  if (group_.contacts.empty()) return;
  if (group_.rank != 0) return AdmissionQueue::redirect(caller.socket, group_.contacts[0]);
  admission_.request(std::move(caller.socket), request, static_cast<int>(group_.contacts.size()));
}

void Quorum::answer_rank(PendingCallers::Caller caller) {
  const Op op = caller.first.op;
  if (op != Op::call && op != Op::ask) return;
  const Message message = Message::decode(caller.first.value);
  const int rank = message.number("rank", 0), number = message.number("number", 0);
  const std::string& name = message.text("name");
  const auto reply = [&](Op answer, const std::string& value = "") {
    send_frame(caller.socket, {answer, 0, "", value}, patience_end());
  };
  std::lock_guard lock(mutex_);
  if (number + 1 == group_.number && name == group_.previous_name &&
      std::count(group_.survivors.begin(), group_.survivors.end(), rank) > 0) {
    // The caller has not received the survivors yet. The connection stays open until the caller has entered
    // the group.
    reply(Op::survivors, group_.announcement);
    callers_.push_back({std::move(caller.socket), -1});
  } else if (number > group_.number) {
    reply(Op::retry);  // this rank has not received the survivors yet
  } else if (number < group_.number || name != group_.name) {
    reply(Op::missed,
          fmt::format("the other ranks have continued without rank {}, which did not answer them in time",
                      rank));
  } else {
    failure_reported_ = forming_.given_up = true;
    round_.heard.insert(rank);
    if (op == Op::ask) {
      reply(Op::alive);
      round_.outranked = round_.outranked || rank < group_.rank;
    } else if (round_.follows) {
      reply(Op::retry);
    } else {
      callers_.push_back({std::move(caller.socket), rank});
    }
  }
}

// ---- New ranks ----

std::string Quorum::contacts() const {
  std::lock_guard lock(mutex_);
  return fmt::format("{}\n", fmt::join(group_.contacts, "\n"));
}

int Quorum::number() const {
  std::lock_guard lock(mutex_);
  return group_.number;
}

Quorum::NextGroup Quorum::grown_by(const std::vector<AdmissionQueue::Joiner>& joiners) const {
  std::lock_guard lock(mutex_);
  NextGroup grown{.ranks = std::vector<int>(group_.contacts.size()), .name = random_secret()};
  std::iota(grown.ranks.begin(), grown.ranks.end(), 0);
  for (const AdmissionQueue::Joiner& joiner : joiners) grown.joined.push_back(joiner.contact);
  return grown;
}

void Quorum::begin(int number, const std::string& name) {
  std::lock_guard lock(mutex_);
  group_.number = number;
  group_.name = name;
}

// How survivors find each other: the part of Quorum that runs on the thread of the rank's calls.

namespace {

using Op = Frame::Op;
using std::chrono::milliseconds;

constexpr milliseconds kFirstAsk{50};   // most survivors call before they are asked
constexpr milliseconds kAskAgain{500};  // a rank may die while this rank waits for its call
constexpr milliseconds kRetry{20};
constexpr size_t kAskAtOnce = 16;  // number of ranks; each takes a thread and a descriptor
// How much later a leader may be notified of the failure. The time includes the leader's calls to lower
// ranks.
constexpr milliseconds kSlack{3000};

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

// Runs work(i) for all i < n, each on a separate thread, or on the caller's thread if the system refuses
// threads. Rethrows the exception of the lowest i whose call threw.
template <typename Work>
void run_concurrently(size_t n, Work work) {
  std::vector<std::exception_ptr> errors(n);
  std::vector<Thread> threads;
  threads.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    const auto guarded = [&errors, &work, i] {
      try {
        work(i);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    };
    try {
      threads.emplace_back("a thread that asks a rank", guarded);
    } catch (const std::exception&) {
      guarded();
    }
  }
  threads.clear();  // joins the threads
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace

std::string Quorum::NextGroup::encode() const {
  Message message;
  message.add("name", name).add("location", location);
  for (const int rank : ranks) message.add("rank", rank);
  for (const std::string& contact : joined) message.add("joined", contact);
  return message.encode();
}

Quorum::NextGroup Quorum::NextGroup::decode(const std::string& text, int rank, int world) {
  const Message message = Message::decode(text);
  NextGroup survivors{.ranks = message.numbers("rank", 0, world - 1),
                      .name = message.text("name"),
                      .location = message.text("location"),
                      .joined = message.texts("joined")};
  const auto& all = survivors.ranks;
  const bool ascending = std::adjacent_find(all.begin(), all.end(), std::greater_equal<>()) == all.end();
  if (survivors.name.empty() || !contains(all, rank) || !ascending) {
    throw CommError("rank {} has received an invalid description of the next group", rank);
  }
  return survivors;
}

// Connects to a rank, authenticates this rank and sends its request.
Quorum::Call Quorum::call(int rank, Op request) {
  const auto deadline = patience_end();
  const std::string& text = group_.contacts[static_cast<size_t>(rank)];
  Contact contact = Contact::parse(text).value_or(Contact());
  const auto known = reached_.find(text);
  if (known != reached_.end() && std::find(contact.addresses.begin(), contact.addresses.end(),
                                           known->second) != contact.addresses.end()) {
    contact.addresses = {known->second};
  }
  const Credentials credentials{listener_.credentials.key, purpose_of(contact.name)};
  Message me;
  me.add("rank", group_.rank).add("number", group_.number).add("name", group_.name);
  while (true) {
    Reach reached = reach(contact, credentials, {.deadline = deadline});
    // Only `gone` proves that the process has stopped listening, because an unreachable machine does not
    // refuse connections.
    if (reached.gone) return {Presence::gone, {}};
    if (reached.socket && send_frame(*reached.socket, {request, 0, "", me.encode()}, deadline)) {
      return {Presence::here, std::move(*reached.socket)};
    }
    if (SteadyClock::now() + kRetry >= deadline) return {};
    std::this_thread::sleep_for(kRetry);
  }
}

// Waits for the rank `leader` to send the survivors. Returns nullopt if the leader died, was stopped, or
// follows another rank.
std::optional<Quorum::NextGroup> Quorum::follow(int leader, Socket socket, SteadyClock::time_point deadline) {
  std::string bytes;
  while (true) {
    const auto frame = receive_frame(socket, bytes, std::min(deadline, patience_end()));
    if (frame && frame->op == Op::survivors) {
      NextGroup survivors =
          NextGroup::decode(frame->value, group_.rank, static_cast<int>(group_.contacts.size()));
      std::lock_guard lock(mutex_);
      forming_.announcer = std::move(socket);
      return survivors;
    }
    if (frame && frame->op == Op::missed) throw CommError("rank {}: {}", group_.rank, frame->value);
    if (frame || !socket || SteadyClock::now() >= deadline) return std::nullopt;
    if (call(leader, Op::ask).presence != Presence::here) return std::nullopt;
  }
}

// Asks lower ranks until a rank answers. Asks several ranks concurrently, so that several stopped ranks delay
// this rank as little as one stopped rank. Skips the ranks in `silent`, which have not answered in this
// regrouping.
void Quorum::look_below(std::set<int>& silent, std::set<int>& gone) {
  std::vector<int> ask;
  for (int r = 0; r < group_.rank; ++r) {
    if (!silent.contains(r)) ask.push_back(r);
  }
  bool found = false;
  for (size_t begin = 0; begin < ask.size() && !found; begin += kAskAtOnce) {
    std::vector<Presence> presence(std::min(kAskAtOnce, ask.size() - begin));
    run_concurrently(presence.size(),
                     [&](size_t i) { presence[i] = call(ask[begin + i], Op::ask).presence; });
    for (size_t i = 0; i < presence.size(); ++i) {
      if (presence[i] == Presence::gone) gone.insert(ask[begin + i]);
      if (presence[i] == Presence::silent) silent.insert(ask[begin + i]);
      found = found || presence[i] == Presence::here;
    }
  }
}

Quorum::NextGroup Quorum::regroup(milliseconds timeout) {
  const auto give_up = SteadyClock::now() + timeout + kSlack;
  // A cancellation ends only earlier deadlines.
  if (RunningClock::cancelled()) throw CommError("rank {}: cancelled", group_.rank);
  std::optional<SteadyClock::time_point> lead_until;  // counted from when this rank leads
  std::set<int> silent;
  while (SteadyClock::now() < give_up) {
    std::set<int> gone;
    {
      std::lock_guard lock(mutex_);
      for (const int r : round_.heard) silent.erase(r);
      round_ = {.follows = group_.rank > 0};  // until it is known that no lower rank answers
      forming_.followers.clear();
      forming_.announcer.close();
      if (round_.follows) send_away();
    }
    look_below(silent, gone);
    const auto now = SteadyClock::now();
    if (now >= give_up) break;  // for example if the call was cancelled
    int leader = 0;
    while (silent.contains(leader) || gone.contains(leader)) ++leader;
    std::optional<NextGroup> survivors;
    if (leader < group_.rank) {
      Call called = call(leader, Op::call);
      if (called.presence == Presence::silent) silent.insert(leader);
      if (called.presence == Presence::here) survivors = follow(leader, std::move(called.socket), give_up);
    } else {
      {
        std::lock_guard lock(mutex_);
        round_.follows = false;
      }
      // Not a new reading of the clock, which may follow a cancellation.
      if (!lead_until) lead_until = now + timeout;
      survivors = lead(silent, std::move(gone), *lead_until);
      if (survivors && survivors->location.empty()) return *survivors;  // this rank leads
    }
    if (survivors) {
      adopt(*survivors);
      return *survivors;
    }
    std::this_thread::sleep_for(kRetry);
  }
  throw CommError("rank {}: the ranks that are left did not find each other in time", group_.rank);
}

// Sends `retry` to all waiting callers, because this rank follows another rank. Requires the mutex.
void Quorum::send_away() {
  std::erase_if(callers_, [](const Caller& c) {
    if (c.rank >= 0) send_frame(c.socket, {Op::retry, 0, "", ""}, patience_end());
    return c.rank >= 0;
  });
}

// Returns the higher ranks of unknown presence. Requires the mutex.
std::vector<int> Quorum::missing(const std::set<int>& silent, const std::set<int>& gone) const {
  std::vector<int> ranks;
  for (int r = group_.rank + 1; r < static_cast<int>(group_.contacts.size()); ++r) {
    const bool called =
        std::any_of(callers_.begin(), callers_.end(), [&](const Caller& c) { return c.rank == r; });
    if (!called && !gone.contains(r) && !silent.contains(r)) ranks.push_back(r);
  }
  return ranks;
}

// Leads the regrouping: waits for the calls of the other survivors. Returns nullopt if a lower rank leads
// after all. Returns survivors with a location if another rank has already received the survivors.
std::optional<Quorum::NextGroup> Quorum::lead(std::set<int> silent, std::set<int> gone,
                                              SteadyClock::time_point deadline) {
  auto ask_at = SteadyClock::now() + kFirstAsk;
  while (true) {
    std::vector<int> ask;
    {
      std::unique_lock lock(mutex_);
      wait_until(changed_, lock, std::min(ask_at, deadline),
                 [&] { return round_.outranked || round_.lost_caller || missing(silent, gone).empty(); });
      round_.lost_caller = false;
      if (round_.outranked) {
        send_away();
        return std::nullopt;
      }
      ask = missing(silent, gone);
      if (SteadyClock::now() >= deadline) {  // the ranks are alive, but did not call
        silent.insert(ask.begin(), ask.end());
        ask.clear();
      }
      if (ask.empty()) return count(silent, gone);
    }
    if (auto survivors = ask_missing(ask, silent, gone)) return survivors;
    ask_at = SteadyClock::now() + kAskAgain;
  }
}

// Asks these ranks concurrently. Returns the survivors if a rank has already received them.
std::optional<Quorum::NextGroup> Quorum::ask_missing(const std::vector<int>& ranks, std::set<int>& silent,
                                                     std::set<int>& gone) {
  std::vector<Presence> presence(ranks.size());
  std::vector<std::optional<Frame>> replies(ranks.size());
  run_concurrently(ranks.size(), [&](size_t i) {
    Call called = call(ranks[i], Op::ask);
    std::string bytes;
    if (called.socket) replies[i] = receive_frame(called.socket, bytes, patience_end());
    presence[i] = called.presence == Presence::here && !replies[i] ? Presence::silent : called.presence;
  });
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (presence[i] == Presence::gone) gone.insert(ranks[i]);
    if (presence[i] == Presence::silent) silent.insert(ranks[i]);
    if (replies[i] && replies[i]->op == Op::missed) {
      throw CommError("rank {}: {}", group_.rank, replies[i]->value);
    }
    if (replies[i] && replies[i]->op == Op::survivors) {
      return NextGroup::decode(replies[i]->value, group_.rank, static_cast<int>(group_.contacts.size()));
    }
  }
  return std::nullopt;
}

// Decides which ranks survive. Throws CommError if too few ranks are alive. Requires the mutex.
Quorum::NextGroup Quorum::count(std::set<int> silent, const std::set<int>& gone) {
  std::set<int> here = {group_.rank};
  for (const Caller& c : callers_) {
    if (c.rank > group_.rank && c.rank < static_cast<int>(group_.contacts.size())) here.insert(c.rank);
  }
  // A rank that continued without this rank may have ended normally meanwhile.
  if (RunningClock::long_stops() != long_stops_) silent.insert(gone.begin(), gone.end());
  for (const int r : here) silent.erase(r);
  const size_t alive = here.size(), perhaps = alive + silent.size();
  const bool has_lowest = silent.empty() || *here.begin() < *silent.begin();
  if (2 * alive < perhaps || (2 * alive == perhaps && !has_lowest)) {
    send_away();
    throw CommError(
        "rank {} cannot continue: rank{} {} did not answer, but may be alive, and may continue without it",
        group_.rank, silent.size() == 1 ? "" : "s", fmt::join(silent, ", "));
  }
  here.erase(group_.rank);
  NextGroup survivors{.ranks = {group_.rank}, .name = random_secret()};
  for (const int r : here) {
    // Use the rank's latest call, because the rank has abandoned its earlier calls.
    const auto its =
        std::find_if(callers_.rbegin(), callers_.rend(), [&](const Caller& c) { return c.rank == r; });
    survivors.ranks.push_back(r);
    forming_.followers.push_back(std::move(its->socket));
    callers_.erase(std::next(its).base());
  }
  return survivors;
}

std::vector<int> Quorum::followers() const {
  std::lock_guard lock(mutex_);
  std::vector<int> sockets;
  for (const Socket& socket : forming_.followers) sockets.push_back(socket.fd());
  return sockets;
}

bool Quorum::given_up() const {
  std::lock_guard lock(mutex_);
  return forming_.given_up || (forming_.announcer && forming_.announcer.hung_up());
}

void Quorum::publish(NextGroup survivors, const std::string& location) {
  survivors.location = location;
  adopt(survivors);
}

// Makes the survivors the current group. Notifies current and future callers.
void Quorum::adopt(const NextGroup& survivors) {
  std::lock_guard lock(mutex_);
  group_.survivors = survivors.ranks;
  group_.announcement = survivors.encode();
  ++group_.number;
  group_.previous_name = std::exchange(group_.name, survivors.name);
  forming_.given_up = false;
  const Frame announcement{Op::survivors, 0, "", group_.announcement};
  for (const Socket& follower : forming_.followers) send_frame(follower, announcement, patience_end());
  std::erase_if(callers_, [&](Caller& c) {
    if (c.rank < 0) return false;
    const bool survives = contains(group_.survivors, std::exchange(c.rank, -1));
    send_frame(c.socket, survives ? announcement : Frame{Op::retry, 0, "", ""}, patience_end());
    return !survives;
  });
  std::vector<std::string> contacts;
  for (const int r : group_.survivors) contacts.push_back(group_.contacts[static_cast<size_t>(r)]);
  contacts.insert(contacts.end(), survivors.joined.begin(), survivors.joined.end());
  group_.contacts = std::move(contacts);
  const auto me = std::find(group_.survivors.begin(), group_.survivors.end(), group_.rank);
  group_.rank = static_cast<int>(me - group_.survivors.begin());
  round_.follows = false;
  round_.heard.clear();
  long_stops_ = RunningClock::long_stops();
}

}  // namespace gradwire
