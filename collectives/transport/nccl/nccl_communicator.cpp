#ifdef GRADWIRE_HAS_NCCL

#include "collectives/transport/nccl/nccl_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "collectives/transport/exchange_watch.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

// How long a call in progress may take to return before the communicator is ended regardless.
constexpr milliseconds kGrace{200};
// How long deregistering memory may wait for a call in progress.
constexpr milliseconds kDeregister{1000};

}  // namespace

bool NcclCommunicator::Use::enter(milliseconds patience) {
  std::unique_lock lock(mutex);
  if (busy && !closed) {
    ++waiting;
    changed.wait_for(lock, patience, [&] { return !busy || closed; });
    --waiting;
  }
  if (busy || closed) return false;
  busy = true;
  return true;
}

void NcclCommunicator::Use::leave() {
  std::lock_guard lock(mutex);
  busy = false;
  if (waiting > 0) changed.notify_all();
}

NcclCommunicator::NcclCommunicator(const NcclApi& api, std::shared_ptr<GpuCalls> gpu, ncclComm_t comm,
                                   bool owned, bool shrinkable, Pause pause)
    : api_(api),
      gpu_(std::move(gpu)),
      owned_(owned),
      shrinkable_(shrinkable),
      pause_(std::move(pause)),
      comm_(comm) {
  if (api_.user_rank(comm, &rank_) != ncclSuccess || api_.count(comm, &world_) != ncclSuccess) {
    throw BadInput("this is not a working NCCL communicator; pass one that has not failed");
  }
}

ncclResult_t NcclCommunicator::run(const Call& call, const Limits& limits) {
  const Turn turn(use_, limits.turn);
  if (!turn.entered) return ncclInProgress;
  return call(comm_, {.deadline = limits.deadline, .stop = limits.stop, .pause = pause_});
}

ncclResult_t NcclCommunicator::run_apart(Call call, const Limits& limits) {
  struct Running {
    ncclResult_t result = ncclInProgress;
    std::atomic<bool> given_up{false};
    Turn turn;
    Running(const std::shared_ptr<Use>& use, milliseconds patience) : turn(use, patience) {}
  };
  const auto running = std::make_shared<Running>(use_, limits.turn);
  if (!running->turn.entered) return ncclInProgress;
  auto apart = [running, call = std::move(call), gpu = gpu_, pause = pause_, comm = comm_.load(),
                deadline = limits.deadline] {
    gpu->enter_thread();
    running->result =
        call(comm, {.deadline = deadline, .stop = [&] { return running->given_up.load(); }, .pause = pause});
  };
  if (run_with_deadline(std::move(apart), limits.deadline, limits.stop)) return running->result;
  running->given_up = true;
  return ncclInProgress;
}

std::string NcclCommunicator::error(milliseconds patience) {
  const Turn turn(use_, patience);
  if (!turn.entered) return "";
  ncclResult_t result = ncclSuccess;
  if (api_.async_error(comm_, &result) != ncclSuccess) result = ncclInternalError;
  return result == ncclSuccess || result == ncclInProgress ? "" : "NCCL: " + api_.text(result, comm_);
}

WhileAlive NcclCommunicator::while_alive() const {
  return [use = use_](const std::function<void()>& call) {
    const Turn turn(use, kDeregister);
    if (turn.entered) call();
  };
}

// Waits briefly for a call in progress, because an abort frees memory that the call uses. If the call is
// stuck, asks NCCL to end the call (ncclCommRevoke, if available), and aborts if the call still does not end.
// Does not access the object after the abort.
void NcclCommunicator::end() {
  const NcclApi& api = api_;
  const std::shared_ptr<Use> use = use_;
  const bool owned = owned_, shrinkable = shrinkable_;
  std::unique_lock lock(use->mutex);
  use->closed = true;
  use->changed.notify_all();
  ++use->waiting;
  const auto left = [&] { return use->changed.wait_for(lock, kGrace, [&] { return !use->busy; }); };
  const bool quiet = left();
  const ncclComm_t comm = comm_;
  if (owned && (shrinkable || (!quiet && api.revoke != nullptr))) {
    revoked_ = shrinkable;
    lock.unlock();
    api.revoke(comm, 0);
    lock.lock();
    if (!quiet) left();
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

bool NcclCommunicator::ended_within(milliseconds patience) {
  std::unique_lock lock(use_->mutex);
  return use_->changed.wait_for(lock, patience, [&] { return use_->ended; });
}

void NcclCommunicator::close() {
  std::lock_guard lock(use_->mutex);
  use_->closed = true;
}

void NcclCommunicator::destroy(const std::function<bool()>& must_abort) {
  const ncclComm_t comm = comm_;
  if (!owned_ || comm == nullptr) return;
  auto farewell = [&api = api_, gpu = gpu_, pause = pause_, comm, revoked = revoked_.load(),
                   abort = !revoked_ && must_abort()] {
    gpu->enter_thread();
    const NcclPatience patience{.deadline = SteadyClock::now() + kFarewell, .pause = pause};
    if (revoked) {
      settle_nccl(api, comm, ncclInProgress, patience);
      api.destroy(comm);
    } else if (!abort && settle_nccl(api, comm, api.finalize(comm), patience) == ncclSuccess) {
      api.destroy(comm);
    } else {
      api.abort(comm);
    }
  };
  run_with_deadline(std::move(farewell), SteadyClock::now() + 2 * kFarewell);
}

ncclComm_t NcclCommunicator::derive(const std::string& doing, milliseconds timeout, const Make& make) {
  const auto deadline = SteadyClock::now() + std::max(timeout, milliseconds(1000));
  const ncclComm_t parent = comm_;
  if (parent == nullptr)
    throw CommError(fmt::format("rank {}: {}: the communicator was aborted", rank_, doing));
  struct Deriving {
    ncclComm_t child = nullptr;
    ncclResult_t result = ncclInProgress;
  };
  const auto deriving = std::make_shared<Deriving>();
  auto call = [deriving, make, &api = api_, gpu = gpu_, use = use_, parent, revoked = revoked_.load(),
               patience = NcclPatience{.deadline = deadline, .pause = pause_}]() mutable {
    gpu->enter_thread();
    ncclResult_t& result = deriving->result;
    if (revoked) {  // wait until the revocation is complete
      std::unique_lock lock(use->mutex);
      if (!use->changed.wait_until(lock, patience.deadline, [&] { return use->ended; })) return;
      lock.unlock();
      result = settle_nccl(api, parent, ncclInProgress, patience);
      if (result != ncclSuccess) return;
    }
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    result = make(parent, &deriving->child, &config);
    if (result != ncclInProgress) return;
    result = settle_nccl(api, parent, result, patience);
    if (result == ncclSuccess && deriving->child != nullptr)
      result = settle_nccl(api, deriving->child, ncclInProgress, patience);
  };
  const bool returned = run_with_deadline(std::move(call), deadline + kGrace);
  if (returned && deriving->result == ncclSuccess) return deriving->child;
  if (returned && deriving->child != nullptr) api_.abort(deriving->child);
  const bool late = !returned || deriving->result == ncclInProgress;
  throw CommError(fmt::format("rank {}: {}: {}", rank_, doing,
                              late ? "no progress until the deadline" : api_.text(deriving->result, parent)));
}

}  // namespace gradwire

#endif  // GRADWIRE_HAS_NCCL
