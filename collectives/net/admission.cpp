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
constexpr const char* kEnded = "the run has ended or no longer admits ranks";

// Sends to a joiner. The connection's buffer has room unless the joiner has not read for hours.
bool tell(const Socket& socket, const char* key, const std::string& text = "", Op op = Op::ok) {
  const std::string frame = StoreMessage{op, 0, key, text}.encode();
  return send(socket.fd(), frame.data(), frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(frame.size());
}

}  // namespace

void Quorum::open_admission(int most, std::function<std::string(const std::string&)> validate) {
  std::lock_guard lock(mutex_);
  most_ = most;
  validate_ = std::move(validate);
}

void Quorum::close_admission() {
  std::lock_guard lock(mutex_);
  validate_ = [](const std::string&) { return kEnded; };
  for (Caller& c : callers_) {
    if (c.joiner.empty()) continue;
    tell(c.socket, kUnwelcome, kEnded, Op::refuse);
    c.socket.close();
  }
  std::erase_if(callers_, [](const Caller& c) { return !c.socket; });
  waiting_ = 0;
}

std::string Quorum::contacts() const {
  std::lock_guard lock(mutex_);
  return fmt::format("{}\n", fmt::join(contacts_, "\n"));
}

int Quorum::number() const {
  std::lock_guard lock(mutex_);
  return number_;
}

// Requires the mutex, like answer().
void Quorum::hear(Caller& c, const std::string& text) {
  const auto refuse = [&](const char* key, const std::string& why) {
    tell(c.socket, key, why, Op::refuse);
    c.socket.close();
  };
  const size_t end = text.find('\n');
  if (end == std::string::npos || end == 0 || contacts_.empty()) return c.socket.close();
  if (rank_ != 0) return refuse(kElsewhere, contacts_[0]);
  const int ranks = static_cast<int>(contacts_.size()), waiting = waiting_;
  std::string why;
  if (!validate_) {
    why = "this group takes no new ranks";
  } else if (ranks + waiting >= most_) {
    why = fmt::format("there are {} ranks{}, and at most {} are allowed", ranks,
                      waiting == 0 ? "" : fmt::format(" and {} more that wait to join", waiting), most_);
  } else {
    why = validate_(text.substr(end + 1));
  }
  if (why.empty()) {
    c.joiner = text.substr(0, end);
    ++waiting_;
    return;
  }
  const std::string from = c.socket.peer_address();
  print_error_line(
      fmt::format("a process at {} cannot join: {}", from.empty() ? "an unknown address" : from, why));
  refuse(kUnwelcome, why);
}

// Keeps joiners waiting: the message shows that a rank still has them on its list. Requires the mutex.
void Quorum::have_joiners_wait() {
  const auto now = SteadyClock::now();
  if (now - told_to_wait_at_ >= kTellToWait) {
    told_to_wait_at_ = now;
    for (Caller& c : callers_) {
      if (!c.joiner.empty() && !tell(c.socket, kWait)) c.socket.close();
    }
    std::erase_if(callers_, [](const Caller& c) { return !c.socket; });
  }
  waiting_ = static_cast<int>(
      std::count_if(callers_.begin(), callers_.end(), [](const Caller& c) { return !c.joiner.empty(); }));
}

std::vector<Quorum::Joiner> Quorum::invite() {
  std::vector<Joiner> asked, here;
  {
    std::lock_guard lock(mutex_);
    for (Caller& c : callers_) {
      if (c.joiner.empty()) continue;
      asked.push_back({c.joiner, std::move(c.socket)});
    }
    std::erase_if(callers_, [](const Caller& c) { return !c.socket; });
    waiting_ = 0;
  }
  std::erase_if(asked, [](const Joiner& n) { return !tell(n.socket, kCome); });
  const auto deadline = SteadyClock::now() + kPatience;
  for (Joiner& n : asked) {
    std::string bytes;
    try {
      const auto reply = receive_message(n.socket, bytes, deadline);
      if (reply && reply->op == Op::hello && reply->key == kCome) here.push_back(std::move(n));
    } catch (const CommError&) {  // not a joiner after all
    }
  }
  return here;
}

void Quorum::grow(const std::string& name, const std::vector<std::string>& joined) {
  Survivors all{.ranks = {}, .name = name, .location = "the group has grown", .joined = joined};
  {
    std::lock_guard lock(mutex_);
    all.ranks.resize(contacts_.size());
  }
  std::iota(all.ranks.begin(), all.ranks.end(), 0);
  adopt(all);
}

void Quorum::begin(int number, const std::string& name) {
  std::lock_guard lock(mutex_);
  number_ = number;
  name_ = name;
}

}  // namespace gradwire
