#include "collectives/net/quorum.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <sstream>
#include <thread>
#include <utility>

#include "collectives/net/secret.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/parse.h"

namespace gradwire {
namespace {

using Op = StoreMessage::Op;
using std::chrono::milliseconds;

constexpr milliseconds kFirstAsk{50};   // most survivors call without being asked
constexpr milliseconds kAskAgain{500};  // awaited ranks may also die
constexpr milliseconds kTick{200};      // poll interval; limits the delay of joiners' wait messages
constexpr milliseconds kRetry{20};
constexpr size_t kAskAtOnce = 16;  // in ranks; each takes a thread and a descriptor
// A leader may be notified of the failure this much later, and it probes lower ranks before it leads.
constexpr milliseconds kSlack{3000};
// Keys of a hello: the caller's request.
constexpr const char* kCall = "call";  // requests the survivors
constexpr const char* kAsk = "ask";    // asks whether the rank is alive
// Keys of a rejection.
constexpr const char* kAgain = "again";    // another rank leads now
constexpr const char* kMissed = "missed";  // the group continued without the caller

// Returns the text that understand() parses: the name, the ranks, the number of joined ranks, the contact of
// each, and the location.
std::string text_of(const Quorum::Survivors& survivors) {
  std::string text =
      fmt::format("{}\n{}\n{}\n", survivors.name, fmt::join(survivors.ranks, " "), survivors.joined.size());
  for (const std::string& contact : survivors.joined) text += contact + "\n";
  return text + survivors.location;
}

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

// Runs work(i) for all i below n, each on its own thread, or on the caller's thread if the system refuses
// threads. Rethrows an exception of one of the calls.
template <typename Work>
void at_once(size_t n, Work work) {
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
  threads.clear();  // joins
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace

Quorum::Quorum(const std::string& address, const std::string& key, const PortRange& ports)
    : address_(address),
      listener_name_(random_secret()),
      credentials_{key, purpose_of(listener_name_)},
      listener_(listen_within(ports, address)) {
  thread_ = Thread("the thread that answers other ranks", [this] { serve(); });
}

Quorum::~Quorum() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.set();
  thread_.join();
}

std::string Quorum::contact() const {
  return contact_of(listener_, address_, listener_name_).text();
}

void Quorum::enter(int rank, std::vector<std::string> contacts,
                   std::function<void(const std::string&)> failed,
                   std::function<bool(const std::string&)> note) {
  std::scoped_lock lock(calling_, mutex_);
  rank_ = rank;
  contacts_ = std::move(contacts);
  failed_ = std::move(failed);
  note_ = std::move(note);
  told_ = false;  // belongs to the previous group
  followers_.clear();
  if (told_by_) {
    const StoreMessage here{Op::hello, 0, kHere, ""};
    send_all(told_by_, here.encode(), SteadyClock::now() + kPatience);
    told_by_.close();
  }
}

void Quorum::leave() {
  std::lock_guard lock(calling_);
  failed_ = nullptr;
  note_ = nullptr;
}

// ---- The serving thread ----

void Quorum::serve() {
  while (true) {
    try {
      return serve_until_stopped();
    } catch (const std::bad_alloc&) {  // retry once there is memory
      std::this_thread::sleep_for(kTick);
    }
  }
}

void Quorum::serve_until_stopped() {
  while (true) {
    std::vector<pollfd> entries = {{wake_.fd(), POLLIN, 0}, {acceptor_.fd(), POLLIN, 0}};
    {
      std::lock_guard lock(mutex_);
      for (const Caller& c : callers_) entries.push_back({c.socket.fd(), POLLIN, 0});
    }
    poll(entries.data(), entries.size(), static_cast<int>(kTick.count()));
    std::unique_lock lock(mutex_);
    if (stop_) return;
    told_ = false;
    serve_callers();
    changed_.notify_all();
    const std::vector<std::string> notes = std::exchange(notes_, {});
    if (!told_ && notes.empty()) continue;
    const int rank = rank_;
    lock.unlock();
    std::lock_guard calling(calling_);
    report_rejected(rank, notes);
    lock.lock();
    const bool still_told = told_;  // false if this process has entered the next group meanwhile
    lock.unlock();
    if (still_told && failed_) failed_("another rank has found that the group has failed");
  }
}

void Quorum::reject(const Caller& c, const std::string& why) {
  if (const std::string line = rejected_.note(c.from, why); !line.empty()) notes_.push_back(line);
}

// Runs without the mutex: rank 0 may be slow.
void Quorum::report_rejected(int rank, const std::vector<std::string>& lines) {
  for (const std::string& line : lines) {
    if (note_ && note_(line)) continue;
    print_error_line(fmt::format("rank {} {}", rank, line));
  }
}

void Quorum::serve_callers() {
  for (Caller& c : callers_) {
    try {
      listen_to(c);
    } catch (const CommError&) {
      c.socket.close();  // not a rank
    }
    lost_caller_ = lost_caller_ || (!c.socket && c.rank >= 0);
  }
  std::erase_if(callers_, [](const Caller& c) { return !c.socket; });
  for (size_t i = 0; i < kMaxUnauthenticated; ++i) {
    auto socket = acceptor_.accept();
    if (!socket) break;
    const std::string from = socket->peer_address();
    callers_.push_back({std::move(*socket), from, std::make_unique<Challenge>(credentials_)});
  }
  have_joiners_wait();
  // Drop the oldest unauthenticated callers.
  const size_t most = kMaxUnauthenticated + 2 * contacts_.size();
  while (static_cast<size_t>(std::count_if(callers_.begin(), callers_.end(),
                                           [](const Caller& c) { return c.challenge != nullptr; })) > most) {
    const auto oldest = std::find_if(callers_.begin(), callers_.end(),
                                     [](const Caller& c) { return c.challenge != nullptr; });
    reject(*oldest, kTooMany);
    callers_.erase(oldest);
  }
}

void Quorum::listen_to(Caller& c) {
  if (c.challenge) {
    const Challenge::State state = c.challenge->advance(c.socket);
    if (state == Challenge::State::refused) {
      reject(c, c.challenge->why());
      c.socket.close();
    }
    if (state != Challenge::State::proved) return;
    c.challenge = nullptr;
  }
  while (c.socket) {
    char bytes[256];
    const ssize_t n = recv(c.socket.fd(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) return c.socket.close();
    c.in.append(bytes, static_cast<size_t>(n));
    while (auto message = StoreMessage::decode(c.in)) answer(c, *message);
  }
}

// Requires the mutex, like everything the thread does with callers.
void Quorum::answer(Caller& c, const StoreMessage& message) {
  std::istringstream words(message.value);
  int rank = -1, number = -1;
  std::string name;
  if (message.op == Op::hello && message.key == kRequest) return hear(c, message.value);
  if (message.op != Op::hello || !(words >> rank >> number >> name) || rank < 0) return c.socket.close();
  const auto reply = [&](Op op, const char* key, const std::string& text) {
    send_all(c.socket, StoreMessage{op, 0, key, text}.encode(), SteadyClock::now() + kPatience);
  };
  if (number + 1 == number_ && name == before_ && contains(last_, rank)) {
    reply(Op::ok, "", last_text_);  // the caller has not received it yet
  } else if (number > number_) {
    reply(Op::refuse, kAgain, "");  // this rank has not received it yet
  } else if (number < number_ || name != name_) {
    reply(
        Op::refuse, kMissed,
        fmt::format("the other ranks have gone on without rank {}, which did not answer them in time", rank));
  } else {
    told_ = given_up_ = true;
    heard_.insert(rank);
    if (message.key == kAsk) {
      reply(Op::ok, "", "");
      outranked_ = outranked_ || rank < rank_;
    } else if (follows_) {
      reply(Op::refuse, kAgain, "");
    } else {
      c.rank = rank;  // the caller waits
    }
  }
}

// ---- The rank's own thread ----

// Connects to a rank, authenticates this rank and sends its request.
Quorum::Call Quorum::call(int rank, const char* what) {
  const auto deadline = SteadyClock::now() + kPatience;
  const std::string& text = contacts_[static_cast<size_t>(rank)];
  Contact contact = Contact::parse(text).value_or(Contact());
  const auto known = reached_.find(text);
  if (known != reached_.end() && std::find(contact.addresses.begin(), contact.addresses.end(),
                                           known->second) != contact.addresses.end()) {
    contact.addresses = {known->second};
  }
  const Credentials credentials{credentials_.key, purpose_of(contact.name)};
  const std::string me = fmt::format("{} {} {}", rank_, number_, name_);
  while (true) {
    Reach reached = reach(contact, credentials, {.deadline = deadline});
    // Only these errors prove that the process has stopped listening; an unreachable machine does not refuse
    // connections.
    if (reached.gone) return {Presence::gone, {}};
    if (reached.socket &&
        send_all(*reached.socket, StoreMessage{Op::hello, 0, what, me}.encode(), deadline)) {
      return {Presence::here, std::move(*reached.socket)};
    }
    if (SteadyClock::now() + kRetry >= deadline) return {};
    std::this_thread::sleep_for(kRetry);
  }
}

Quorum::Survivors Quorum::understand(const std::string& text) const {
  std::istringstream lines(text);
  std::string ranks, joined;
  Survivors survivors;
  std::getline(lines, survivors.name);
  std::getline(lines, ranks);
  std::istringstream numbers(ranks);
  for (int r; numbers >> r;) survivors.ranks.push_back(r);
  std::getline(lines, joined);
  for (int left = parse_number<int>(joined).value_or(0); left > 0 && std::getline(lines, joined); --left) {
    survivors.joined.push_back(joined);
  }
  survivors.location.assign(std::istreambuf_iterator<char>(lines), {});
  const auto& all = survivors.ranks;
  if (survivors.name.empty() || !contains(all, rank_) || !std::is_sorted(all.begin(), all.end()) ||
      std::adjacent_find(all.begin(), all.end()) != all.end() || all.front() < 0 ||
      all.back() >= static_cast<int>(contacts_.size())) {
    throw CommError(fmt::format("rank {}: what it was told of who is left cannot be read", rank_));
  }
  return survivors;
}

// Waits for the survivors from rank `leader`. Returns nullopt if the leader died, was stopped, or follows
// another rank.
std::optional<Quorum::Survivors> Quorum::follow(int leader, Socket socket, SteadyClock::time_point deadline) {
  std::string bytes;
  while (true) {
    const auto now = SteadyClock::now();
    const auto message = receive_message(socket, bytes, std::min(deadline, now + kPatience));
    if (message && message->op == Op::ok) {
      Survivors survivors = understand(message->value);
      std::lock_guard lock(mutex_);
      told_by_ = std::move(socket);
      return survivors;
    }
    if (message && message->key == kMissed)
      throw CommError(fmt::format("rank {}: {}", rank_, message->value));
    if (message || !socket || SteadyClock::now() >= deadline) return std::nullopt;
    if (call(leader, kAsk).presence != Presence::here) return std::nullopt;
  }
}

// Asks lower ranks until some answer, several concurrently, so that several stopped ranks cost no more time
// than one. Ranks in `silent` have not answered in this regrouping and are not asked again.
void Quorum::look_below(std::set<int>& silent, std::set<int>& gone) {
  std::vector<int> ask;
  for (int r = 0; r < rank_; ++r) {
    if (!silent.contains(r)) ask.push_back(r);
  }
  bool found = false;
  for (size_t begin = 0; begin < ask.size() && !found; begin += kAskAtOnce) {
    std::vector<Presence> presence(std::min(kAskAtOnce, ask.size() - begin));
    at_once(presence.size(), [&](size_t i) { presence[i] = call(ask[begin + i], kAsk).presence; });
    for (size_t i = 0; i < presence.size(); ++i) {
      if (presence[i] == Presence::gone) gone.insert(ask[begin + i]);
      if (presence[i] == Presence::silent) silent.insert(ask[begin + i]);
      found = found || presence[i] == Presence::here;
    }
  }
}

Quorum::Survivors Quorum::regroup(milliseconds timeout) {
  const auto give_up = SteadyClock::now() + timeout + kSlack;
  std::optional<SteadyClock::time_point> lead_until;  // counted from when this rank leads
  std::set<int> silent;
  while (SteadyClock::now() < give_up) {
    std::set<int> gone;
    std::optional<Survivors> survivors;
    {
      std::lock_guard lock(mutex_);
      for (const int r : heard_) silent.erase(r);
      heard_.clear();
      follows_ = rank_ > 0;  // until known that no lower rank answers
      outranked_ = lost_caller_ = false;
      followers_.clear();
      told_by_.close();
      if (follows_) send_away();
    }
    look_below(silent, gone);
    if (SteadyClock::now() >= give_up) break;  // for example after the call was cancelled
    int leader = 0;
    while (silent.contains(leader) || gone.contains(leader)) ++leader;
    if (leader < rank_) {
      Call called = call(leader, kCall);
      if (called.presence == Presence::silent) silent.insert(leader);
      if (called.presence == Presence::here) survivors = follow(leader, std::move(called.socket), give_up);
    } else {
      {
        std::lock_guard lock(mutex_);
        follows_ = false;
      }
      if (!lead_until) lead_until = SteadyClock::now() + timeout;
      survivors = lead(silent, std::move(gone), *lead_until);
      if (survivors && survivors->location.empty()) return *survivors;  // this rank's own decision
    }
    if (survivors) {
      adopt(*survivors);
      return *survivors;
    }
    std::this_thread::sleep_for(kRetry);
  }
  throw CommError(fmt::format("rank {}: the ranks that are left did not find each other in time", rank_));
}

// Makes waiting callers start again, because this rank follows another. Requires the mutex.
void Quorum::send_away() {
  for (Caller& c : callers_) {
    if (c.rank < 0) continue;
    send_all(c.socket, StoreMessage{Op::refuse, 0, kAgain, ""}.encode(), SteadyClock::now() + kPatience);
    c.socket.close();
  }
  std::erase_if(callers_, [](const Caller& c) { return !c.socket; });
}

std::vector<int> Quorum::missing(const std::set<int>& silent, const std::set<int>& gone) const {
  std::vector<int> ranks;
  for (int r = rank_ + 1; r < static_cast<int>(contacts_.size()); ++r) {
    const bool called =
        std::any_of(callers_.begin(), callers_.end(), [&](const Caller& c) { return c.rank == r; });
    if (!called && !gone.contains(r) && !silent.contains(r)) ranks.push_back(r);
  }
  return ranks;
}

// Returns nullopt if a lower rank leads after all. Returns survivors with a location if they have already
// been notified.
std::optional<Quorum::Survivors> Quorum::lead(std::set<int> silent, std::set<int> gone,
                                              SteadyClock::time_point deadline) {
  auto ask_at = SteadyClock::now() + kFirstAsk;
  while (true) {
    std::vector<int> ask;
    {
      std::unique_lock lock(mutex_);
      wait_until(changed_, lock, std::min(ask_at, deadline),
                 [&] { return outranked_ || lost_caller_ || missing(silent, gone).empty(); });
      lost_caller_ = false;
      if (outranked_) {
        send_away();
        return std::nullopt;
      }
      ask = missing(silent, gone);
      if (SteadyClock::now() >= deadline) {  // alive, but did not call
        silent.insert(ask.begin(), ask.end());
        ask.clear();
      }
      if (ask.empty()) return count(silent, gone);
    }
    std::vector<Presence> presence(ask.size());
    std::vector<std::optional<StoreMessage>> replies(ask.size());
    at_once(ask.size(), [&](size_t i) {
      Call called = call(ask[i], kAsk);
      std::string bytes;
      if (called.socket) replies[i] = receive_message(called.socket, bytes, SteadyClock::now() + kPatience);
      presence[i] = called.presence == Presence::here && !replies[i] ? Presence::silent : called.presence;
    });
    for (size_t i = 0; i < ask.size(); ++i) {
      if (presence[i] == Presence::gone) gone.insert(ask[i]);
      if (presence[i] == Presence::silent) silent.insert(ask[i]);
      if (replies[i] && replies[i]->key == kMissed) {
        throw CommError(fmt::format("rank {}: {}", rank_, replies[i]->value));
      }
      if (replies[i] && replies[i]->op == Op::ok && !replies[i]->value.empty()) {
        return understand(replies[i]->value);
      }
    }
    ask_at = SteadyClock::now() + kAskAgain;
  }
}

// Requires the mutex.
Quorum::Survivors Quorum::count(std::set<int> silent, const std::set<int>& gone) {
  std::set<int> here = {rank_};
  for (const Caller& c : callers_) {
    if (c.rank > rank_ && c.rank < static_cast<int>(contacts_.size())) here.insert(c.rank);
  }
  // A rank that continued without this one may have ended normally since.
  if (RunningClock::long_stops() != long_stops_) silent.insert(gone.begin(), gone.end());
  for (const int r : here) silent.erase(r);
  const size_t alive = here.size(), perhaps = alive + silent.size();
  const bool has_lowest = silent.empty() || *here.begin() < *silent.begin();
  if (2 * alive < perhaps || (2 * alive == perhaps && !has_lowest)) {
    send_away();
    throw CommError(fmt::format(
        "rank {} cannot go on: rank{} {} did not answer, but may be alive, and may go on without it", rank_,
        silent.size() == 1 ? "" : "s", fmt::join(silent, ", ")));
  }
  here.erase(rank_);
  Survivors survivors{.ranks = {rank_}, .name = random_secret()};
  for (const int r : here) {
    // The rank's latest call; it has left earlier ones.
    const auto its =
        std::find_if(callers_.rbegin(), callers_.rend(), [&](const Caller& c) { return c.rank == r; });
    survivors.ranks.push_back(r);
    followers_.push_back(std::move(its->socket));
    its->rank = -1;
  }
  std::erase_if(callers_, [](const Caller& c) { return !c.socket; });
  return survivors;
}

std::vector<int> Quorum::followers() const {
  std::lock_guard lock(mutex_);
  std::vector<int> sockets;
  for (const Socket& socket : followers_) sockets.push_back(socket.fd());
  return sockets;
}

bool Quorum::given_up() const {
  std::lock_guard lock(mutex_);
  return given_up_ || (told_by_ && told_by_.hung_up());
}

void Quorum::publish(Survivors survivors, const std::string& location) {
  survivors.location = location;
  adopt(survivors);
}

// Begins the new group. Notifies current and future callers.
void Quorum::adopt(const Survivors& survivors) {
  std::lock_guard lock(mutex_);
  last_ = survivors.ranks;
  last_text_ = text_of(survivors);
  ++number_;
  before_ = std::exchange(name_, survivors.name);
  given_up_ = false;
  const StoreMessage told{Op::ok, 0, "", last_text_}, again{Op::refuse, 0, kAgain, ""};
  const auto soon = SteadyClock::now() + kPatience;
  for (const Socket& follower : followers_) send_all(follower, told.encode(), soon);
  for (Caller& c : callers_) {
    if (c.rank < 0) continue;
    const bool left = contains(last_, std::exchange(c.rank, -1));
    send_all(c.socket, (left ? told : again).encode(), soon);
    if (!left) c.socket.close();
  }
  std::erase_if(callers_, [](const Caller& c) { return !c.socket; });
  std::vector<std::string> contacts;
  for (const int r : last_) contacts.push_back(contacts_[static_cast<size_t>(r)]);
  contacts.insert(contacts.end(), survivors.joined.begin(), survivors.joined.end());
  contacts_ = std::move(contacts);
  rank_ = static_cast<int>(std::find(last_.begin(), last_.end(), rank_) - last_.begin());
  follows_ = false;
  heard_.clear();
  long_stops_ = RunningClock::long_stops();
}

}  // namespace gradwire
