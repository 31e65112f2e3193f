// The group's side of admitting new ranks: see quorum.h.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/socket.h>

#include <algorithm>
#include <numeric>

#include "collectives/net/quorum.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"

namespace gradwire {
namespace {

using Op = StoreMessage::Op;

constexpr std::chrono::milliseconds kTellToWait{1000};
constexpr const char* kEnded = "the run has ended, or lets nobody in any more";

// Sends to a joiner. The connection's buffer has room unless the joiner has not read for hours.
bool tell(const Socket& socket, const char* key, const std::string& text = "", Op op = Op::ok) {
  const std::string frame = StoreMessage{op, 0, key, text}.encode();
  return send(socket.fd(), frame.data(), frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(frame.size());
}

}  // namespace

void Reunion::open_door(int most, std::function<std::string(const std::string&)> judge) {
  std::lock_guard lock(mutex_);
  most_ = most;
  judge_ = std::move(judge);
}

void Reunion::close_door() {
  std::lock_guard lock(mutex_);
  judge_ = [](const std::string&) { return kEnded; };
  for (Caller& c : callers_) {
    if (c.newcomer.empty()) continue;
    tell(c.socket, kUnwelcome, kEnded, Op::refuse);
    c.socket.close();
  }
  std::erase_if(callers_, [](const Caller& c) { return !c.socket; });
  waiting_ = 0;
}

std::string Reunion::contacts() const {
  std::lock_guard lock(mutex_);
  return fmt::format("{}\n", fmt::join(contacts_, "\n"));
}

int Reunion::number() const {
  std::lock_guard lock(mutex_);
  return number_;
}

// Requires the mutex, like answer().
void Reunion::hear(Caller& c, const std::string& text) {
  const auto refuse = [&](const char* key, const std::string& why) {
    tell(c.socket, key, why, Op::refuse);
    c.socket.close();
  };
  const size_t end = text.find('\n');
  if (end == std::string::npos || end == 0 || contacts_.empty()) return c.socket.close();
  if (rank_ != 0) return refuse(kElsewhere, contacts_[0]);
  const int ranks = static_cast<int>(contacts_.size()), waiting = waiting_;
  std::string why;
  if (!judge_) {
    why = "this group takes no new ranks";
  } else if (ranks + waiting >= most_) {
    why = fmt::format("there are {} ranks{}, and at most {} are allowed", ranks,
                      waiting == 0 ? "" : fmt::format(" and {} more that wait to join", waiting), most_);
  } else {
    why = judge_(text.substr(end + 1));
  }
  if (why.empty()) {
    c.newcomer = text.substr(0, end);
    ++waiting_;
    return;
  }
  const std::string from = c.socket.peer_address();
  print_error_line(
      fmt::format("a process at {} cannot join: {}", from.empty() ? "an unknown address" : from, why));
  refuse(kUnwelcome, why);
}

// Keeps joiners waiting: the message shows that a rank still has them on its list. Requires the mutex.
void Reunion::have_newcomers_wait() {
  const auto now = SteadyClock::now();
  if (now - told_to_wait_at_ >= kTellToWait) {
    told_to_wait_at_ = now;
    for (Caller& c : callers_) {
      if (!c.newcomer.empty() && !tell(c.socket, kWait)) c.socket.close();
    }
    std::erase_if(callers_, [](const Caller& c) { return !c.socket; });
  }
  waiting_ = static_cast<int>(
      std::count_if(callers_.begin(), callers_.end(), [](const Caller& c) { return !c.newcomer.empty(); }));
}

std::vector<Reunion::Newcomer> Reunion::invite() {
  std::vector<Newcomer> asked, here;
  {
    std::lock_guard lock(mutex_);
    for (Caller& c : callers_) {
      if (c.newcomer.empty()) continue;
      asked.push_back({c.newcomer, std::move(c.socket)});
    }
    std::erase_if(callers_, [](const Caller& c) { return !c.socket; });
    waiting_ = 0;
  }
  std::erase_if(asked, [](const Newcomer& n) { return !tell(n.socket, kCome); });
  const auto deadline = SteadyClock::now() + kPatience;
  for (Newcomer& n : asked) {
    std::string bytes;
    try {
      const auto reply = receive_message(n.socket, bytes, deadline);
      if (reply && reply->op == Op::hello && reply->key == kCome) here.push_back(std::move(n));
    } catch (const CommError&) {  // not a joiner after all
    }
  }
  return here;
}

void Reunion::grow(const std::string& name, const std::vector<std::string>& joined) {
  Survivors all{.ranks = {}, .name = name, .meeting = "the group has grown", .joined = joined};
  {
    std::lock_guard lock(mutex_);
    all.ranks.resize(contacts_.size());
  }
  std::iota(all.ranks.begin(), all.ranks.end(), 0);
  adopt(all);
}

void Reunion::begin(int number, const std::string& name) {
  std::lock_guard lock(mutex_);
  number_ = number;
  name_ = name;
}

}  // namespace gradwire
