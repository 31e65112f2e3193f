#ifdef GRADWIRE_HAS_NCCL

#include "collectives/transport/nccl/nccl_communicator.h"

#include <algorithm>
#include <mutex>
#include <thread>
#include <utility>

#include "collectives/transport/exchange_watch.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

// How long a call in progress may take to return before the communicator is ended regardless.
constexpr milliseconds kGrace{200};

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
  if (parent == nullptr) throw CommError("rank {}: {}: the communicator was aborted", rank_, doing);
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
  throw CommError("rank {}: {}: {}", rank_, doing,
                  late ? "no progress until the deadline" : api_.text(deriving->result, parent));
}

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
  if (!failure_.empty()) throw CommError("rank {}: {}: {}", comm_.rank(), doing, failure_);
}

void NcclWatch::give_up(const std::string& doing, const std::string& cause) {
  fail(fmt::format("{}: {}", doing, cause));
  throw_if_failed(doing);
  throw CommError("rank {}: {}: {}", comm_.rank(), doing, cause);
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

using std::chrono::microseconds;

ncclResult_t settle_nccl(const NcclApi& api, ncclComm_t comm, ncclResult_t result,
                         const NcclPatience& patience) {
  if (result != ncclInProgress) return result;
  const auto begin = SteadyClock::now();
  auto pause = microseconds(50);
  for (auto now = begin; result == ncclInProgress && now < patience.deadline && !patience.stop();
       now = SteadyClock::now()) {
    if (now - begin < microseconds(100)) {
      std::this_thread::yield();
    } else {
      patience.pause(pause);
      pause = std::min(2 * pause, microseconds(500));
    }
    if (api.async_error(comm, &result) != ncclSuccess) result = ncclInternalError;
  }
  return result;
}

ncclResult_t run_nccl_group(const NcclApi& api, ncclComm_t comm, cudaStream_t stream,
                            const std::vector<Transfer>& transfers, const NcclPatience& patience) {
  ncclResult_t result = api.group_start();
  if (result != ncclSuccess) return result;
  for (const Transfer& t : transfers) {
    if (t.bytes == 0 || result != ncclSuccess) continue;
    result = t.kind == Transfer::Kind::send ? api.send(t.data, t.bytes, ncclUint8, t.peer, comm, stream)
                                            : api.receive(t.data, t.bytes, ncclUint8, t.peer, comm, stream);
    if (result == ncclInProgress) result = ncclSuccess;  // group_end() returns the real result
  }
  const ncclResult_t ended = api.group_end();
  return settle_nccl(api, comm, result == ncclSuccess ? ended : result, patience);
}

ncclResult_t run_nccl_allreduce(const NcclApi& api, ncclComm_t comm, cudaStream_t stream, const float* in,
                                float* out, int64_t count, bool mean, const NcclPatience& patience) {
  return settle_nccl(api, comm,
                     api.all_reduce(in, out, static_cast<size_t>(count), ncclFloat32,
                                    mean ? ncclAvg : ncclSum, comm, stream),
                     patience);
}

ncclComm_t init_nccl(const NcclApi& api, const std::shared_ptr<GpuCalls>& gpu, int rank, int world,
                     const ncclUniqueId& id, SteadyClock::time_point deadline) {
  struct Joining {
    ncclComm_t comm = nullptr;
    ncclResult_t result = ncclInProgress;
    std::mutex mutex;
    bool done = false, given_up = false;
  };
  const auto joining = std::make_shared<Joining>();
  auto join = [joining, &api, gpu, rank, world, id, deadline] {
    gpu->enter_thread();
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    ncclComm_t comm = nullptr;
    ncclResult_t result = api.init_rank(&comm, world, id, rank, &config);
    result = settle_nccl(api, comm, result, {.deadline = deadline, .pause = [](microseconds time) {
                                               std::this_thread::sleep_for(time);
                                             }});
    std::lock_guard lock(joining->mutex);
    joining->comm = comm;
    joining->result = result;
    joining->done = true;
    if (joining->given_up && comm != nullptr) api.abort(comm);  // the communicator has no other owner
  };
  run_with_deadline(std::move(join), deadline + std::chrono::milliseconds(100));
  std::lock_guard lock(joining->mutex);
  if (joining->done && joining->result == ncclSuccess) return joining->comm;
  joining->given_up = true;
  const std::string why = joining->result == ncclInProgress ? "no progress until the deadline"
                                                            : api.text(joining->result, joining->comm);
  if (joining->comm != nullptr) api.abort(joining->comm);
  throw CommError("rank {} of {}: joining through NCCL: {}; NCCL_DEBUG=INFO says more", rank, world, why);
}

}  // namespace gradwire

#endif  // GRADWIRE_HAS_NCCL
