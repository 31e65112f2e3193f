#include "collectives/transport/tcp/tcp_failure.h"

#include <fmt/format.h>

#include <cstring>
#include <optional>
#include <set>

#include "collectives/net/membership.h"
#include "runtime/util/error.h"
#include "runtime/util/parse.h"

namespace gradwire {
namespace {

constexpr const char* kWaiting = ", waiting for rank ";

}  // namespace

void TcpFailure::set_activity(std::string activity) {
  std::lock_guard lock(mutex_);
  activity_ = std::move(activity);
}

std::string TcpFailure::activity() {
  const int peer = waiting_for_.load();
  std::lock_guard lock(mutex_);
  return peer < 0 ? activity_ : fmt::format("{}{}{}", activity_, kWaiting, peer);
}

void TcpFailure::on_failure(std::function<void()> interrupt) {
  std::lock_guard lock(mutex_);
  interrupt_ = std::move(interrupt);
  if (!failure_.empty()) throw CommError(failure_);
}

void TcpFailure::record(const std::string& cause) {
  std::lock_guard lock(mutex_);
  if (interrupt_) interrupt_();  // first, because the copy may be refused memory
  if (failure_.empty()) failure_ = cause;
}

std::string TcpFailure::recorded() {
  std::lock_guard lock(mutex_);
  return failure_;
}

void TcpFailure::throw_if_failed() {
  std::lock_guard lock(mutex_);
  if (!failure_.empty()) throw CommError(fmt::format("rank {}: {}", group_.rank(), failure_));
}

void TcpFailure::abort(const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    if (!final_error_.empty()) return;  // the group has been notified
  }
  const std::string cause = fmt::format("rank {} gave up: {}", group_.rank(), reason);
  group_.store().report(cause);
  record(cause);
}

void TcpFailure::give_up(const std::string& doing, const std::string& cause) {
  std::string text = fmt::format("rank {}: {}: ", group_.rank(), doing);
  const int waited_for = waiting_for_.load();
  {
    std::lock_guard lock(mutex_);
    if (!final_error_.empty()) throw CommError(text + "the group has failed: " + final_error_);
  }
  text += cause;
  const std::optional<std::string> first = group_.store().report(text);
  record(first.value_or(text));
  if (!first) {
    text += "; no answer from rank 0, which runs the store";
  } else {
    if (*first != text && cause.find(*first) == std::string::npos) text += "; the first to fail: " + *first;
    text += activities_of_others(waited_for);
  }
  std::lock_guard lock(mutex_);
  final_error_ = text;
  throw CommError(text);
}

// Returns "; gone: rank 2; rank 3 is in call 17, ..., waiting for rank 1; ...": first the ranks that do not
// answer, then the chain of waits from this rank to the rank that caused the failure, then other ranks.
std::string TcpFailure::activities_of_others(int waited_for) {
  const RollCall roll = group_.store().roll_call();
  std::string text = roll.absent();
  if (!text.empty()) text = "; " + text;
  const int world = static_cast<int>(roll.ranks.size());
  std::set<int> listed = {group_.rank()};
  auto list = [&](int r) {
    const std::string& state = roll.ranks[r].state;
    if (roll.ranks[r].presence != RollCall::Presence::here || state.empty() || !listed.insert(r).second) {
      return false;
    }
    text += fmt::format("; rank {} is {}", r, state);
    return true;
  };
  for (int r = waited_for; r >= 0 && r < world && listed.size() < 6 && list(r);) {
    const std::string& state = roll.ranks[r].state;
    const size_t at = state.rfind(kWaiting);
    if (at == std::string::npos) break;
    r = parse_number<int>(state.substr(at + std::strlen(kWaiting))).value_or(-1);
  }
  for (int r = 0; r < world && listed.size() < 5; ++r) list(r);
  return text;
}

}  // namespace gradwire
