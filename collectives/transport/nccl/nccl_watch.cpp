#ifdef GRADWIRE_HAS_NCCL

#include "collectives/transport/nccl/nccl_watch.h"

#include <fmt/format.h>

#include <algorithm>
#include <thread>

#include "runtime/util/error.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

// Interval of the thread's polls while exchanges are in flight, and while none is in flight.
constexpr milliseconds kLookEvery{20}, kLookWhenIdle{500};
// How long an exchange may make no progress before this rank compares the exchange's call with the other
// ranks' calls.
constexpr milliseconds kDoubt{1000};

}  // namespace

NcclWatch::NcclWatch(NcclCommunicator& comm, Membership* group, milliseconds timeout, OtherCall other_call)
    : comm_(comm),
      group_(group),
      timeout_(timeout),
      other_call_(std::move(other_call)),
      in_flight_(timeout),
      standing_(in_flight_.standing()) {
  if (watches()) thread_ = Thread("the thread that watches NCCL", [this] { watch(); });
}

std::string NcclWatch::standing() {
  std::lock_guard lock(mutex_);
  return standing_;
}

void NcclWatch::fail(const std::string& cause, bool from_group) {
  std::lock_guard lock(mutex_);
  if (cause_) return;
  cause_ = Cause{cause, from_group};
  if (!watches()) failure_ = cause;
  changed_.notify_all();
}

bool NcclWatch::failing() {
  std::lock_guard lock(mutex_);
  return cause_.has_value();
}

void NcclWatch::await_failure_handled() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !cause_ || !failure_.empty(); });
}

void NcclWatch::throw_if_failed(const std::string& doing) {
  await_failure_handled();
  std::lock_guard lock(mutex_);
  if (!failure_.empty()) throw CommError(fmt::format("rank {}: {}: {}", comm_.rank(), doing, failure_));
}

void NcclWatch::give_up(const std::string& doing, const std::string& cause) {
  fail(fmt::format("{}: {}", doing, cause));
  throw_if_failed(doing);
  throw CommError(fmt::format("rank {}: {}: {}", comm_.rank(), doing, cause));
}

std::unique_ptr<ExchangeMark> NcclWatch::mark_for(const Stream& stream) {
  if (comm_.gpu().capturing(stream)) return comm_.gpu().make_captured_mark(stream);
  {
    std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      auto mark = std::move(spare_.back());
      spare_.pop_back();
      return mark;
    }
  }
  return comm_.gpu().make_mark();
}

void NcclWatch::watch_exchange(std::unique_ptr<ExchangeMark> mark, WatchedExchange exchange) {
  std::lock_guard lock(mutex_);
  const bool was_idle = !in_flight_.active();
  in_flight_.add(std::move(mark), std::move(exchange));
  if (was_idle) changed_.notify_all();
}

ncclResult_t NcclWatch::watch_call(const std::string& what, const std::vector<Transfer>& transfers,
                                   const std::function<ncclResult_t()>& call) {
  {
    std::lock_guard lock(mutex_);
    in_nccl_ = {SteadyClock::now(), &what, &transfers};
  }
  const ncclResult_t result = call();
  std::lock_guard lock(mutex_);
  in_nccl_.reset();
  return result;
}

bool NcclWatch::stop() {
  bool failed = false;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    failed = cause_.has_value();
    changed_.notify_all();
  }
  if (thread_.joinable() && failed && !comm_.ended_within(NcclCommunicator::kFarewell)) thread_.detach();
  thread_.join();
  return failed;
}

bool NcclWatch::drained() {
  const auto deadline = SteadyClock::now() + NcclCommunicator::kFarewell;
  std::lock_guard lock(mutex_);  // uncontended: no other thread is left
  try {
    for (in_flight_.overdue(SteadyClock::now()); in_flight_.unfinished();
         in_flight_.overdue(SteadyClock::now())) {
      if (SteadyClock::now() > deadline) return false;
      std::this_thread::sleep_for(milliseconds(1));
    }
  } catch (const std::exception&) {  // the GPU failed
    return false;
  }
  return true;
}

void NcclWatch::watch() try {
  comm_.gpu().enter_thread();
  const milliseconds often = std::clamp(timeout_ / 10, milliseconds(1), kLookEvery);
  Doubt doubt;
  std::unique_lock lock(mutex_);
  while (!stop_ && !cause_) {
    const bool active = in_flight_.active();
    changed_.wait_for(lock, active ? often : kLookWhenIdle,
                      [&] { return stop_ || cause_ || in_flight_.active() != active; });
    if (!stop_ && !cause_) look(lock, doubt);
  }
  if (cause_) end_group(lock);
} catch (const std::exception&) {  // the other ranks find the communicator ended
  {
    std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = "no memory";  // short enough to need no allocation
    changed_.notify_all();
  }
  comm_.end();
}

// Sets cause_ if NCCL or an exchange has failed, or another rank's call differs from this rank's.
void NcclWatch::look(std::unique_lock<std::mutex>& lock, Doubt& doubt) {
  lock.unlock();
  const std::string nccl_error = comm_.error(milliseconds(0));
  lock.lock();
  const std::string late = overdue();
  std::optional<WatchedExchange> stalled;
  const auto now = SteadyClock::now();
  const WatchedExchange* exchange = group_ != nullptr ? in_flight_.stalled(now, kDoubt) : nullptr;
  if (exchange != nullptr && doubt.is_due(exchange->number, now)) stalled = *exchange;
  standing_ = in_flight_.standing();
  for (auto& mark : in_flight_.take_spare()) spare_.push_back(std::move(mark));

  const auto found = [&](const std::string& text) {
    if (!text.empty() && !cause_) cause_ = Cause{text};
  };
  if (!nccl_error.empty()) found(fmt::format("{}: {}", standing_, nccl_error));
  found(late);
  if (!stalled || cause_) return;
  lock.unlock();
  const std::string other = other_call_(*stalled);
  lock.lock();
  found(other);
}

bool NcclWatch::Doubt::is_due(uint64_t number, SteadyClock::time_point now) {
  if (number == exchange && now < next) return false;
  interval = number != exchange ? kDoubt : 2 * interval;
  next = now + interval;
  exchange = number;
  return true;
}

std::string NcclWatch::overdue() {
  try {
    const std::optional<std::string> text = in_flight_.overdue(SteadyClock::now());
    if (in_nccl_ && SteadyClock::now() - in_nccl_->since > timeout_) {
      return fmt::format("{}: no progress for {} ms inside NCCL: {}", *in_nccl_->what, timeout_.count(),
                         pending_text(*in_nccl_->transfers));
    }
    return text.value_or("");
  } catch (const std::exception& error) {  // the GPU failed, and its marks fail as well
    return error.what();
  }
}

void NcclWatch::end_group(std::unique_lock<std::mutex>& lock) {
  const Cause cause = *cause_;
  lock.unlock();
  std::string text = cause.from_group || group_ == nullptr ? cause.text : notify_group(cause.text);
  lock.lock();
  // Set failure_ before the kernels stop waiting, so that check() reports it to a thread that synchronizes a
  // stream.
  failure_ = std::move(text);
  changed_.notify_all();
  lock.unlock();
  comm_.end();  // this object may have been destroyed when end() returns
}

// Reports the failure, finds out which ranks still answer, and returns an error text with all known facts.
std::string NcclWatch::notify_group(const std::string& cause) {
  StoreClient& store = group_->store();
  std::string text = cause;
  const std::optional<std::string> first = store.report(fmt::format("rank {}: {}", comm_.rank(), cause));
  if (!first) return text + "; no answer from rank 0, which runs the store";
  if (first->find(cause) == std::string::npos) text += "; the first to fail: " + *first;
  const RollCall roll = store.roll_call();
  if (const std::string absent = roll.absent(); !absent.empty()) text += "; " + absent;
  std::lock_guard lock(mutex_);
  int listed = 0;
  for (int r = 0; r < static_cast<int>(roll.ranks.size()); ++r) {
    const std::string& state = roll.ranks[r].state;
    if (roll.ranks[r].presence != RollCall::Presence::here || state.empty() || state == standing_) continue;
    if (++listed > 3) break;
    text += fmt::format("; rank {} is {}", r, state);
  }
  return text;
}

}  // namespace gradwire

#endif  // GRADWIRE_HAS_NCCL
