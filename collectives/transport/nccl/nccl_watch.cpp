// NcclTransport's watching thread: detects that the group has failed and shuts it down.
#ifdef GRADWIRE_HAS_NCCL

#include <fmt/format.h>

#include <algorithm>

#include "collectives/transport/nccl/nccl_transport.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLookWhenIdle{500};
// How long an exchange may make no progress before this rank compares its call with the other ranks'.
constexpr milliseconds kDoubt{1000};

}  // namespace

void NcclTransport::watch() {
  setup_.gpu->enter_thread();
  const milliseconds often = std::clamp(setup_.timeout / 10, milliseconds(1), kLookEvery);
  // The stalled exchange, the time of the next comparison, and the interval after that.
  uint64_t doubtful = 0;
  auto look_at = SteadyClock::time_point::min();
  milliseconds look_again = kDoubt;
  std::unique_lock lock(mutex_);
  while (!stop_ && !cause_) {
    const bool active = in_flight_.active();
    changed_.wait_for(lock, active ? often : kLookWhenIdle,
                      [&] { return stop_ || cause_ || in_flight_.active() != active; });
    if (stop_ || cause_) break;
    lock.unlock();
    const std::string text = nccl_error(milliseconds(0));
    lock.lock();
    std::optional<std::string> overdue;
    try {
      overdue = in_flight_.overdue(SteadyClock::now());
      if (in_nccl_ && SteadyClock::now() - in_nccl_->since > setup_.timeout) {
        overdue = fmt::format("{}: no progress for {} ms inside NCCL: {}", *in_nccl_->what,
                              setup_.timeout.count(), pending_text(*in_nccl_->transfers));
      }
    } catch (const std::exception& error) {  // the GPU failed; its marks fail with it
      overdue = error.what();
    }
    std::optional<WatchedExchange> stalled;
    const auto now = SteadyClock::now();
    if (const WatchedExchange* e = setup_.group ? in_flight_.stalled(now, kDoubt) : nullptr) {
      if (e->number != doubtful || now >= look_at) {
        look_again = e->number != doubtful ? kDoubt : 2 * look_again;
        look_at = now + look_again;
        doubtful = e->number;
        stalled = *e;
      }
    }
    standing_ = in_flight_.standing();
    for (auto& mark : in_flight_.take_spare()) spare_.push_back(std::move(mark));
    if (const std::string reported = reported_by_kernels(); !reported.empty() && !cause_) cause_ = reported;
    if (!text.empty() && !cause_) cause_ = fmt::format("{}: {}", standing_, text);
    if (overdue && !cause_) cause_ = *overdue;
    if (stalled && !cause_) {
      lock.unlock();
      const std::string other = other_call(*stalled);
      lock.lock();
      if (!other.empty() && !cause_) cause_ = other;
    }
  }
  if (!cause_) return;
  // The group has failed: shut it down.
  const std::string cause = *cause_;
  const bool from_group = cause_from_group_;
  lock.unlock();
  std::string text = from_group || !setup_.group ? cause : tell_the_group(cause);
  lock.lock();
  // Set before the kernels stop waiting, so that check() reports it to a thread that synchronizes a stream.
  failure_ = std::move(text);
  changed_.notify_all();
  for (const auto& weak : windows_) {
    if (const auto alive = weak.lock()) alive->stop();
  }
  lock.unlock();
  end_communicator();
}

// Returns NCCL's own error for the communicator; empty if there is none or a call is in progress.
std::string NcclTransport::nccl_error(milliseconds patience) {
  const Turn turn(use_, patience);
  if (!turn.entered) return "";
  ncclResult_t result = ncclSuccess;
  if (api_.async_error(comm_, &result) != ncclSuccess) result = ncclInternalError;
  return result == ncclSuccess || result == ncclInProgress ? "" : "NCCL: " + api_.text(result, comm_);
}

// Reports the failure, finds out which ranks still answer, and returns everything known.
std::string NcclTransport::tell_the_group(const std::string& cause) {
  std::string text = cause;
  const std::optional<std::string> first =
      setup_.group->store().report(fmt::format("rank {}: {}", rank(), cause));
  if (!first) return text + "; no answer from rank 0, which runs the store";
  if (first->find(cause) == std::string::npos) text += "; the first to fail: " + *first;
  const RollCall roll = setup_.group->store().roll_call();
  if (const std::string absent = roll.absent(); !absent.empty()) text += "; " + absent;
  std::lock_guard lock(mutex_);
  int told = 0;
  for (int r = 0; r < static_cast<int>(roll.ranks.size()); ++r) {
    const std::string& state = roll.ranks[r].state;
    if (roll.ranks[r].presence != RollCall::Presence::here || state.empty() || state == standing_) continue;
    if (++told > 3) break;
    text += fmt::format("; rank {} is {}", r, state);
  }
  return text;
}

// Waits briefly for a call in progress, because an abort frees memory that the call uses. If the call is
// stuck, asks NCCL to end it (ncclCommRevoke, if available), and aborts if that does not help.
//
// An abort may hang, so this object must not be touched after it; see the destructor.
void NcclTransport::end_communicator() {
  const NcclApi& api = api_;
  const std::shared_ptr<Use> use = use_;
  const bool owned = setup_.owned, shrinkable = setup_.shrinkable;
  std::unique_lock lock(use->mutex);
  use->closed = true;
  use->changed.notify_all();
  ++use->waiting;
  auto left = [&] { return use->changed.wait_for(lock, kGrace, [&] { return !use->busy; }); };
  bool quiet = left();
  const ncclComm_t comm = comm_;
  if (owned && (shrinkable || (!quiet && api.revoke != nullptr))) {
    revoked_ = shrinkable;
    lock.unlock();
    api.revoke(comm, 0);
    lock.lock();
    quiet = quiet || left();
  }
  --use->waiting;
  if (owned && !shrinkable) {
    comm_ = nullptr;
    lock.unlock();
    api.abort(comm);
    lock.lock();
  }
  use->ended = true;
  use->changed.notify_all();
}

}  // namespace gradwire

#endif  // GRADWIRE_HAS_NCCL
