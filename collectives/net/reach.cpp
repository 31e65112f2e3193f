// Concurrent attempts to reach one listener: reach() of contact.h.
#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "collectives/net/contact.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

// Delays before an attempt at the next address if the current address does not answer: while connecting, and
// after the connection is established. An accepting rank may be busy for a long time, and each dropped
// connection would add a line to that rank's log.
constexpr milliseconds kNextAfter{200}, kNextAfterConnected{2000};
// Delay before another attempt at an address that did not answer; the address may be reachable by then.
constexpr milliseconds kConnectAnew{5000};
constexpr milliseconds kFirstPause{20}, kLongestPause{500};

// The attempts at one address: waits for its start time, connects, performs the handshake, and, if allowed,
// retries after a failure.
class Attempt {
 public:
  Attempt(const Address& address, const Credentials& credentials, bool retry)
      : address_(address), credentials_(credentials), retry_(retry), why_("no answer") {}

  // Continues the attempt; does nothing before the start time. Returns whether the handshake has succeeded.
  bool advance(SteadyClock::time_point now) {
    if (state_ == State::idle && now >= begin_at_) begin(now);
    if (state_ == State::connecting && writable_) finish_connecting();
    if (state_ == State::connecting && now - began_at_ >= kConnectAnew && retry_) fail("no answer", now);
    if (state_ == State::proving) prove(now);
    return state_ == State::proved;
  }

  pollfd entry() const {
    if (state_ == State::connecting) return {socket_.fd(), POLLOUT, 0};
    if (state_ == State::proving) return {socket_.fd(), POLLIN, 0};
    return {-1, 0, 0};
  }
  void polled(const pollfd& entry) { writable_ = state_ == State::connecting && entry.revents != 0; }

  // Returns the time at which advance() must run even if no data arrives; far in the future if advance() need
  // not run.
  SteadyClock::time_point wake_at() const {
    if (state_ == State::idle) return begin_at_;
    if (state_ == State::connecting && retry_) return began_at_ + kConnectAnew;
    return SteadyClock::time_point::max();
  }
  // Returns when the attempt at the next address may start.
  SteadyClock::time_point next_at() const {
    if (failed_ || state_ == State::ended) return SteadyClock::time_point::min();
    if (state_ == State::idle) return SteadyClock::time_point::max();
    return began_at_ + (state_ == State::proving ? kNextAfterConnected : kNextAfter);
  }

  void begin_at(SteadyClock::time_point time) { begin_at_ = time; }
  bool waits() const { return state_ == State::idle && begin_at_ == SteadyClock::time_point::max(); }
  bool ended() const { return state_ == State::ended; }
  bool refused() const { return refused_; }
  bool other_secret() const { return why_ == kOtherSecret; }
  std::string why() const { return fmt::format("{}: {}", address_.text(), why_); }
  Socket take() { return std::move(socket_); }

 private:
  enum class State { idle, connecting, proving, proved, ended };

  void begin(SteadyClock::time_point now) {
    began_at_ = now;
    writable_ = false;
    std::string why;
    auto socket = begin_connect(address_, why);
    if (!socket) return fail(why, now);
    socket_ = std::move(*socket);
    state_ = State::connecting;
  }

  void finish_connecting() {
    const int error = connect_error(socket_);
    if (error != 0) {
      fail(std::strerror(error), SteadyClock::now());
      refused_ = error == ECONNREFUSED;
      return;
    }
    introduction_ = std::make_unique<Introduction>(credentials_);
    state_ = State::proving;
  }

  void prove(SteadyClock::time_point now) {
    switch (introduction_->advance(socket_)) {
      case Introduction::State::proved:
        state_ = State::proved;
        break;
      case Introduction::State::refused:
        fail(introduction_->why(), now);
        break;
      case Introduction::State::waiting:
        break;
    }
  }

  void fail(const std::string& why, SteadyClock::time_point now) {
    why_ = why;
    refused_ = false;
    failed_ = true;
    socket_.close();
    // The port belongs to another process now.
    const bool again = retry_ && !other_secret();
    state_ = again ? State::idle : State::ended;
    begin_at_ = now + pause_;
    pause_ = std::min(2 * pause_, kLongestPause);
  }

  const Address address_;
  const Credentials& credentials_;
  const bool retry_;
  State state_ = State::idle;
  SteadyClock::time_point begin_at_ = SteadyClock::time_point::max(), began_at_ = {};
  milliseconds pause_ = kFirstPause;
  Socket socket_;
  std::unique_ptr<Introduction> introduction_;
  std::string why_;
  bool writable_ = false, refused_ = false, failed_ = false;
};

}  // namespace

Reach reach(const Contact& contact, const Credentials& credentials, const ReachOptions& options) {
  std::vector<std::unique_ptr<Attempt>> attempts;
  Reach result;
  for (const std::string& address : addresses_to_try(contact)) {
    std::string why;
    for (const Address& a : resolve({address, contact.port}, why)) {
      attempts.push_back(std::make_unique<Attempt>(a, credentials, options.retry));
    }
    if (!why.empty()) result.why = fmt::format("{}: {}", Endpoint{address, contact.port}.text(), why);
  }
  if (attempts.empty()) return result;
  attempts.front()->begin_at(SteadyClock::now());
  const auto far = SteadyClock::time_point::max();
  while (true) {
    const auto now = SteadyClock::now();
    auto wake_at = options.deadline;
    bool all_ended = true;
    for (size_t i = 0; i < attempts.size(); ++i) {
      Attempt& attempt = *attempts[i];
      if (attempt.waits() && i > 0) {
        const auto next_at = attempts[i - 1]->next_at();
        if (next_at <= now) attempt.begin_at(now);
        if (next_at != far) wake_at = std::min(wake_at, next_at);
      }
      if (attempt.advance(now)) {
        result.socket = attempt.take();
        prepare_for_messages(*result.socket);
        return result;
      }
      all_ended = all_ended && attempt.ended();
      wake_at = std::min(wake_at, attempt.wake_at());
    }
    if (all_ended || now >= options.deadline) break;
    // An attempt that has just failed lets the next attempt start.
    bool begin = false;
    for (size_t i = 1; i < attempts.size(); ++i) {
      begin = begin || (attempts[i]->waits() && attempts[i - 1]->next_at() <= now);
    }
    if (begin) continue;
    std::vector<pollfd> entries = {{options.stop, POLLIN, 0}};
    for (const auto& attempt : attempts) entries.push_back(attempt->entry());
    poll(entries.data(), entries.size(), std::min(1000, milliseconds_until(wake_at)));
    if (entries[0].revents != 0) {
      result.why = "interrupted";
      return result;
    }
    for (size_t i = 0; i < attempts.size(); ++i) attempts[i]->polled(entries[i + 1]);
  }
  result.gone = result.other_secret = result.why.empty();
  for (const auto& attempt : attempts) {
    result.gone = result.gone && (attempt->refused() || attempt->other_secret());
    result.other_secret = result.other_secret && attempt->other_secret();
    result.why += (result.why.empty() ? "" : "; ") + attempt->why();
  }
  return result;
}

}  // namespace gradwire
