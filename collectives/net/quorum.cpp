#include "collectives/net/quorum.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>

#include <algorithm>
#include <numeric>
#include <thread>
#include <utility>

#include "collectives/net/secret.h"
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

}  // namespace gradwire
