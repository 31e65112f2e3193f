#include "collectives/net/quorum.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <iterator>
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

Quorum::~Quorum() {
  stop_ = true;
  wake_.set();
  thread_.join();
}

void Quorum::enter(int rank, std::vector<std::string> contacts,
                   std::function<void(const std::string&)> failed,
                   std::function<bool(const std::string&)> note) {
  std::scoped_lock lock(calling_, mutex_);
  rank_ = rank;
  contacts_ = std::move(contacts);
  failed_ = std::move(failed);
  note_ = std::move(note);
  failure_reported_ = false;  // a reported failure belongs to the previous group
  followers_.clear();
  if (announcer_) {
    send_frame(announcer_, {Op::joined, 0, "", ""}, patience_end());
    announcer_.close();
  }
}

// ---- The serving thread ----

void Quorum::serve() {
  while (!stop_) {
    try {
      return serve_until_stopped();
    } catch (const std::exception&) {  // retry once memory is available
      std::this_thread::sleep_for(kTick);
    }
  }
}

void Quorum::serve_until_stopped() {
  while (true) {
    std::vector<pollfd> entries = {{wake_.fd(), POLLIN, 0}};
    size_t ranks = 0;
    {
      std::lock_guard lock(mutex_);
      for (const Caller& c : callers_) entries.push_back({c.socket.fd(), POLLRDHUP, 0});
      ranks = contacts_.size();
    }
    admission_.add_entries(entries);
    listener_.add_entries(entries);
    poll(entries.data(), entries.size(), static_cast<int>(kTick.count()));
    if (stop_) return;
    {
      std::lock_guard lock(mutex_);
      std::erase_if(callers_, [&](const Caller& c) {
        const bool lost = c.socket.hung_up();
        round_.lost_caller = round_.lost_caller || (lost && c.rank >= 0);
        return lost;
      });
    }
    for (auto& caller : listener_.advance(entries, ranks)) {
      try {
        answer(std::move(caller));
      } catch (const CommError&) {  // the caller is not a rank; hang up
      }
    }
    admission_.update();
    changed_.notify_all();
    notify_owner(listener_.take_log());
  }
}

// Reports rejected connections and the failure of the group to the owner. Runs without the mutex, because
// rank 0 may be slow to answer.
void Quorum::notify_owner(const std::vector<std::string>& log) {
  const auto state = [&] {
    std::lock_guard lock(mutex_);
    return std::pair(rank_, failure_reported_);
  };
  const auto [rank, reported] = state();
  if (!reported && log.empty()) return;
  std::lock_guard calling(calling_);
  for (const std::string& line : log) {
    if (note_ && note_(line)) continue;
    print_error_line(fmt::format("rank {} {}", rank, line));
  }
  if (!state().second) return;  // this process has already entered the next group
  {
    std::lock_guard lock(mutex_);
    failure_reported_ = false;
  }
  if (failed_) failed_("another rank has found that the group has failed");
}

void Quorum::answer(Listener::Caller caller) {
  if (caller.first.op != Op::request) return answer_rank(std::move(caller));
  std::lock_guard lock(mutex_);
  const Message request = Message::decode(caller.first.value);
  if (contacts_.empty()) return;
  if (rank_ != 0) {
    send_frame(caller.socket, {Op::redirect, 0, "", contacts_[0]}, patience_end());
    return;
  }
  admission_.request(std::move(caller.socket), request, static_cast<int>(contacts_.size()));
}

void Quorum::answer_rank(Listener::Caller caller) {
  const Op op = caller.first.op;
  if (op != Op::call && op != Op::ask) return;
  const Message message = Message::decode(caller.first.value);
  const int rank = message.number("rank", 0), number = message.number("number", 0);
  const std::string& name = message.text("name");
  const auto reply = [&](Op answer, const std::string& value = "") {
    send_frame(caller.socket, {answer, 0, "", value}, patience_end());
  };
  std::lock_guard lock(mutex_);
  if (number + 1 == number_ && name == previous_name_ &&
      std::count(survivors_.begin(), survivors_.end(), rank) > 0) {
    // The caller has not received the survivors yet. The connection stays open until the caller has entered
    // the group.
    reply(Op::survivors, announcement_);
    callers_.push_back({std::move(caller.socket), -1});
  } else if (number > number_) {
    reply(Op::retry);  // this rank has not received the survivors yet
  } else if (number < number_ || name != name_) {
    reply(Op::missed,
          fmt::format("the other ranks have continued without rank {}, which did not answer them in time",
                      rank));
  } else {
    failure_reported_ = given_up_ = true;
    round_.heard.insert(rank);
    if (op == Op::ask) {
      reply(Op::alive);
      round_.outranked = round_.outranked || rank < rank_;
    } else if (round_.follows) {
      reply(Op::retry);
    } else {
      callers_.push_back({std::move(caller.socket), rank});
    }
  }
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
  const std::string& text = contacts_[static_cast<size_t>(rank)];
  Contact contact = Contact::parse(text).value_or(Contact());
  const auto known = reached_.find(text);
  if (known != reached_.end() && std::find(contact.addresses.begin(), contact.addresses.end(),
                                           known->second) != contact.addresses.end()) {
    contact.addresses = {known->second};
  }
  const Credentials credentials{listener_.key(), purpose_of(contact.name)};
  Message me;
  me.add("rank", rank_).add("number", number_).add("name", name_);
  while (true) {
    Reach reached = reach(contact, credentials, deadline);
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
      NextGroup survivors = NextGroup::decode(frame->value, rank_, static_cast<int>(contacts_.size()));
      std::lock_guard lock(mutex_);
      announcer_ = std::move(socket);
      return survivors;
    }
    if (frame && frame->op == Op::missed) throw CommError("rank {}: {}", rank_, frame->value);
    if (frame || !socket || SteadyClock::now() >= deadline) return std::nullopt;
    if (call(leader, Op::ask).presence != Presence::here) return std::nullopt;
  }
}

// Asks these ranks concurrently whether they are alive, so that several stopped ranks delay this rank as
// little as one stopped rank. Adds the ranks that are not here to `gone` or `silent`. With `replies`, waits
// for the answer of each rank; a rank that does not send an answer is silent. Returns whether some rank is
// here.
bool Quorum::ask(const std::vector<int>& ranks, std::set<int>& silent, std::set<int>& gone,
                 std::vector<std::optional<Frame>>* replies) {
  std::vector<Presence> presence(ranks.size());
  run_concurrently(ranks.size(), [&](size_t i) {
    Call called = call(ranks[i], Op::ask);
    presence[i] = called.presence;
    if (replies == nullptr || called.presence != Presence::here) return;
    std::string bytes;
    (*replies)[i] = receive_frame(called.socket, bytes, patience_end());
    if (!(*replies)[i]) presence[i] = Presence::silent;
  });
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (presence[i] == Presence::gone) gone.insert(ranks[i]);
    if (presence[i] == Presence::silent) silent.insert(ranks[i]);
  }
  return std::count(presence.begin(), presence.end(), Presence::here) > 0;
}

Quorum::NextGroup Quorum::regroup(milliseconds timeout) {
  const auto give_up = SteadyClock::now() + timeout + kSlack;
  // A cancellation ends only earlier deadlines.
  if (RunningClock::cancelled()) throw CommError("rank {}: cancelled", rank_);
  std::optional<SteadyClock::time_point> lead_until;  // counted from when this rank leads
  std::set<int> silent;
  while (SteadyClock::now() < give_up) {
    std::set<int> gone;
    {
      std::lock_guard lock(mutex_);
      for (const int r : round_.heard) silent.erase(r);
      round_ = {.follows = rank_ > 0};  // until it is known that no lower rank answers
      followers_.clear();
      announcer_.close();
      if (round_.follows) send_away();
    }
    // Ask lower ranks until a rank answers, except those that have not answered in this regrouping.
    std::vector<int> lower;
    for (int r = 0; r < rank_; ++r) {
      if (!silent.contains(r)) lower.push_back(r);
    }
    for (size_t begin = 0; begin < lower.size(); begin += kAskAtOnce) {
      const auto some = lower.begin() + static_cast<std::ptrdiff_t>(begin);
      const auto n = static_cast<std::ptrdiff_t>(std::min(kAskAtOnce, lower.size() - begin));
      if (ask({some, some + n}, silent, gone)) break;
    }
    const auto now = SteadyClock::now();
    if (now >= give_up) break;  // for example if the call was cancelled
    int leader = 0;
    while (silent.contains(leader) || gone.contains(leader)) ++leader;
    std::optional<NextGroup> survivors;
    if (leader < rank_) {
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
  throw CommError("rank {}: the ranks that are left did not find each other in time", rank_);
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
  for (int r = rank_ + 1; r < static_cast<int>(contacts_.size()); ++r) {
    const bool called = std::ranges::count(callers_, r, &Caller::rank) > 0;
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
    std::vector<int> unknown;
    {
      std::unique_lock lock(mutex_);
      wait_until(changed_, lock, std::min(ask_at, deadline),
                 [&] { return round_.outranked || round_.lost_caller || missing(silent, gone).empty(); });
      round_.lost_caller = false;
      if (round_.outranked) {
        send_away();
        return std::nullopt;
      }
      unknown = missing(silent, gone);
      if (SteadyClock::now() >= deadline) {  // the ranks are alive, but did not call
        silent.insert(unknown.begin(), unknown.end());
        unknown.clear();
      }
      if (unknown.empty()) return count(silent, gone);
    }
    std::vector<std::optional<Frame>> replies(unknown.size());
    ask(unknown, silent, gone, &replies);
    for (const auto& reply : replies) {
      if (reply && reply->op == Op::missed) throw CommError("rank {}: {}", rank_, reply->value);
      if (reply && reply->op == Op::survivors) {  // a rank has already received the survivors
        return NextGroup::decode(reply->value, rank_, static_cast<int>(contacts_.size()));
      }
    }
    ask_at = SteadyClock::now() + kAskAgain;
  }
}

// Decides which ranks survive. Throws CommError if too few ranks are alive. Requires the mutex.
Quorum::NextGroup Quorum::count(std::set<int> silent, const std::set<int>& gone) {
  std::set<int> here = {rank_};
  for (const Caller& c : callers_) {
    if (c.rank > rank_ && c.rank < static_cast<int>(contacts_.size())) here.insert(c.rank);
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
        rank_, silent.size() == 1 ? "" : "s", fmt::join(silent, ", "));
  }
  here.erase(rank_);
  NextGroup survivors{.ranks = {rank_}, .name = random_secret()};
  for (const int r : here) {
    // Use the rank's latest call, because the rank has abandoned its earlier calls.
    const auto its = std::ranges::find(callers_.rbegin(), callers_.rend(), r, &Caller::rank);
    survivors.ranks.push_back(r);
    followers_.push_back(std::move(its->socket));
    callers_.erase(std::next(its).base());
  }
  return survivors;
}

void Quorum::adopt(const NextGroup& survivors) {
  std::lock_guard lock(mutex_);
  survivors_ = survivors.ranks;
  announcement_ = survivors.encode();
  ++number_;
  previous_name_ = std::exchange(name_, survivors.name);
  given_up_ = false;
  const Frame announcement{Op::survivors, 0, "", announcement_};
  for (const Socket& follower : followers_) send_frame(follower, announcement, patience_end());
  std::erase_if(callers_, [&](Caller& c) {
    if (c.rank < 0) return false;
    const bool survives = contains(survivors_, std::exchange(c.rank, -1));
    send_frame(c.socket, survives ? announcement : Frame{Op::retry, 0, "", ""}, patience_end());
    return !survives;
  });
  std::vector<std::string> contacts;
  for (const int r : survivors_) contacts.push_back(contacts_[static_cast<size_t>(r)]);
  contacts.insert(contacts.end(), survivors.joined.begin(), survivors.joined.end());
  contacts_ = std::move(contacts);
  const auto me = std::find(survivors_.begin(), survivors_.end(), rank_);
  rank_ = static_cast<int>(me - survivors_.begin());
  round_.follows = false;
  round_.heard.clear();
  long_stops_ = RunningClock::long_stops();
}

}  // namespace gradwire
