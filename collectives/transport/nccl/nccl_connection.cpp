#ifdef GRADWIRE_HAS_NCCL

#include <dlfcn.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <utility>

#include "collectives/transport/exchange_watch.h"
#include "collectives/transport/nccl/nccl_transport.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// How long a call in progress may take to return before the communicator is ended regardless.
constexpr milliseconds kGrace{200};
// How long NCCL may take to shut down a communicator whose peers are all healthy.
constexpr milliseconds kFarewell{10'000};
// Interval of the thread's polls while exchanges are in flight, and while none is in flight.
constexpr milliseconds kLookEvery{20}, kLookWhenIdle{500};
// How long an exchange may make no progress before this rank compares the exchange's call with the other
// ranks' calls.
constexpr milliseconds kDoubt{1000};

}  // namespace

NcclConnection::NcclConnection(const NcclSetup& setup, int rank, OtherCall other_call)
    : setup_(setup),
      api_(*setup.api),
      rank_(rank),
      other_call_(std::move(other_call)),
      comm_(setup.comm),
      in_flight_(setup.timeout),
      standing_(in_flight_.standing()) {
  if (watches()) thread_ = Thread("the thread that watches NCCL", [this] { watch(); });
}

// ---- The communicator

NcclConnection::Turn::Turn(std::shared_ptr<Use> shared, milliseconds patience) : use(std::move(shared)) {
  std::unique_lock lock(use->mutex);
  if (use->busy && !use->closed) {
    ++use->waiting;
    use->changed.wait_for(lock, patience, [&] { return !use->busy || use->closed; });
    --use->waiting;
  }
  if (use->busy || use->closed) return;
  use->busy = entered = true;
}

NcclConnection::Turn::~Turn() {
  if (!entered) return;
  std::lock_guard lock(use->mutex);
  use->busy = false;
  if (use->waiting > 0) use->changed.notify_all();
}

void NcclConnection::post(const Stream& stream, WatchedExchange exchange, bool first, const Call& call) {
  const std::string& what = exchange.what;
  throw_if_failed(what);
  std::unique_ptr<ExchangeMark> mark;
  if (watches()) {
    if (setup_.gpu->capturing(stream)) {
      mark = setup_.gpu->make_captured_mark(stream);
    } else if (std::lock_guard lock(mutex_); !spare_.empty()) {
      mark = std::move(spare_.back());
      spare_.pop_back();
    }
    if (!mark) mark = setup_.gpu->make_mark();
    mark->begin(stream);
  }
  const ncclResult_t result = enqueue(exchange, first, call);
  if (result == ncclInProgress || failing()) {
    throw_if_failed(what);
    give_up(what, fmt::format("no progress for {} ms while connecting: {}", setup_.timeout.count(),
                              pending_text(exchange.transfers)));
  }
  if (result != ncclSuccess) {
    give_up(what, fmt::format("NCCL: {}: {}", api_.text(result, nullptr), pending_text(exchange.transfers)));
  }
  if (!mark) return;
  mark->end(stream);
  std::lock_guard lock(mutex_);
  const bool was_idle = !in_flight_.active();
  in_flight_.add(std::move(mark), std::move(exchange));
  if (was_idle) changed_.notify_all();
}

// Enqueues `call`. Returns ncclInProgress if NCCL made no progress until the deadline, or the group has
// failed meanwhile, or `call` must not run: after end(), or while another call does not return.
ncclResult_t NcclConnection::enqueue(const WatchedExchange& exchange, bool first, const Call& call) {
  const auto stop = [this] { return failing(); };
  const auto deadline = watches() ? SteadyClock::now() + setup_.timeout : SteadyClock::time_point::max();
  const milliseconds patience = watches() ? setup_.timeout : kFarewell;
  if (!watches() || !first) {
    const Turn turn(use_, patience);
    if (!turn.entered) return ncclInProgress;
    const auto in_nccl = [&](const WatchedExchange* now) {
      if (!watches()) return;
      std::lock_guard lock(mutex_);
      in_nccl_ = now;
      in_nccl_since_ = SteadyClock::now();
    };
    in_nccl(&exchange);
    const ncclResult_t result = call(comm_, {.deadline = deadline, .stop = stop, .pause = setup_.pause});
    in_nccl(nullptr);
    return result;
  }
  // In this call NCCL connects and waits for the peers. The call cannot always be ended, so it runs on
  // another thread.
  struct Running {
    ncclResult_t result = ncclInProgress;
    std::atomic<bool> given_up{false};
    Turn turn;
    Running(const std::shared_ptr<Use>& use, milliseconds patience) : turn(use, patience) {}
  };
  const auto running = std::make_shared<Running>(use_, patience);
  if (!running->turn.entered) return ncclInProgress;
  auto apart = [running, call, gpu = setup_.gpu, pause = setup_.pause, comm = comm_.load(), deadline] {
    gpu->enter_thread();
    running->result =
        call(comm, {.deadline = deadline, .stop = [&] { return running->given_up.load(); }, .pause = pause});
  };
  if (run_with_deadline(std::move(apart), deadline, stop)) return running->result;
  running->given_up = true;
  return ncclInProgress;
}

std::string NcclConnection::error(milliseconds patience) {
  const Turn turn(use_, patience);
  if (!turn.entered) return "";
  ncclResult_t result = ncclSuccess;
  if (api_.async_error(comm_, &result) != ncclSuccess) result = ncclInternalError;
  return result == ncclSuccess || result == ncclInProgress ? "" : "NCCL: " + api_.text(result, comm_);
}

// Ends the communicator after a failure: kernels that wait for a peer end. May never return, so this object
// may be destroyed before. Waits briefly for a call in progress, because an abort frees memory that the call
// uses. If the call is stuck, asks NCCL to end the call (ncclCommRevoke, if available), and aborts if the
// call still does not end. Does not access the object after the abort.
void NcclConnection::end() {
  const NcclApi& api = api_;
  const std::shared_ptr<Use> use = use_;
  const bool owned = setup_.owned, shrinkable = setup_.shrinkable;
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

void NcclConnection::destroy() {
  const ncclComm_t comm = comm_;
  if (!setup_.owned || comm == nullptr) return;
  auto farewell = [&api = api_, gpu = setup_.gpu, pause = setup_.pause, comm, revoked = revoked_.load(),
                   abort = !revoked_ && (failing() || !drained())] {
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

ncclComm_t NcclConnection::derive(const std::string& doing, const Make& make) {
  const auto deadline = SteadyClock::now() + std::max(setup_.timeout, milliseconds(1000));
  const ncclComm_t parent = comm_;
  if (parent == nullptr) throw CommError("rank {}: {}: the communicator was aborted", rank_, doing);
  struct Deriving {
    ncclComm_t child = nullptr;
    ncclResult_t result = ncclInProgress;
  };
  const auto deriving = std::make_shared<Deriving>();
  auto call = [deriving, make, &api = api_, gpu = setup_.gpu, use = use_, parent, revoked = revoked_.load(),
               patience = NcclPatience{.deadline = deadline, .pause = setup_.pause}]() mutable {
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

// ---- The failure

void NcclConnection::throw_if_failed(const std::string& doing) {
  await_failure_handled();
  std::lock_guard lock(mutex_);
  if (!failure_.empty()) throw CommError("rank {}: {}: {}", rank_, doing, failure_);
}

void NcclConnection::give_up(const std::string& doing, const std::string& cause) {
  fail(fmt::format("{}: {}", doing, cause));
  throw_if_failed(doing);
  throw CommError("rank {}: {}: {}", rank_, doing, cause);
}

// ---- The watching thread

void NcclConnection::stop() {
  bool failed = false;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    failed = cause_.has_value();
    changed_.notify_all();
  }
  if (thread_.joinable() && failed) {
    std::unique_lock lock(use_->mutex);
    if (!use_->changed.wait_for(lock, kFarewell, [&] { return use_->ended; })) thread_.detach();
  }
  thread_.join();
}

// Returns whether all exchanges have ended. If an exchange has not ended, finalizing NCCL would wait for that
// exchange without a limit.
bool NcclConnection::drained() {
  const auto deadline = SteadyClock::now() + kFarewell;
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

void NcclConnection::watch() try {
  setup_.gpu->enter_thread();
  const milliseconds often = std::clamp(setup_.timeout / 10, milliseconds(1), kLookEvery);
  std::unique_lock lock(mutex_);
  while (!stop_ && !cause_) {
    const bool active = in_flight_.active();
    changed_.wait_for(lock, active ? often : kLookWhenIdle,
                      [&] { return stop_ || cause_ || in_flight_.active() != active; });
    if (!stop_ && !cause_) look(lock);
  }
  if (!cause_) return;
  std::string text = *cause_;
  const bool notified = from_group_ || !setup_.group;
  lock.unlock();
  if (!notified) text = notify_group(text);
  lock.lock();
  // Set failure_ before the kernels stop waiting, so that check() reports it to a thread that synchronizes a
  // stream.
  failure_ = std::move(text);
  changed_.notify_all();
  lock.unlock();
  end();                           // this object may have been destroyed when end() returns
} catch (const std::exception&) {  // the other ranks find the communicator ended
  {
    std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = "no memory";  // short enough to need no allocation
    changed_.notify_all();
  }
  end();
}

// Sets cause_ if NCCL or an exchange has failed, or another rank's call differs from this rank's.
void NcclConnection::look(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  const std::string nccl_error = error(milliseconds(0));
  lock.lock();
  const auto now = SteadyClock::now();
  std::string late;
  try {
    late = in_flight_.overdue(now).value_or("");
    if (in_nccl_ != nullptr && now - in_nccl_since_ > setup_.timeout) {
      late = fmt::format("{}: no progress for {} ms inside NCCL: {}", in_nccl_->what, setup_.timeout.count(),
                         pending_text(in_nccl_->transfers));
    }
  } catch (const std::exception& error) {  // the GPU failed, and its marks fail as well
    late = error.what();
  }
  std::optional<WatchedExchange> stalled;
  const WatchedExchange* exchange = setup_.group ? in_flight_.stalled(now, kDoubt) : nullptr;
  if (exchange != nullptr && (exchange->number != doubted_ || now >= doubt_at_)) {
    stalled = *exchange;
    doubt_interval_ = exchange->number != doubted_ ? kDoubt : 2 * doubt_interval_;
    doubt_at_ = now + doubt_interval_;
    doubted_ = exchange->number;
  }
  standing_ = in_flight_.standing();
  for (auto& mark : in_flight_.take_spare()) spare_.push_back(std::move(mark));

  const auto found = [&](const std::string& text) {
    if (!text.empty() && !cause_) cause_ = text;
  };
  if (!nccl_error.empty()) found(fmt::format("{}: {}", standing_, nccl_error));
  found(late);
  if (!stalled || cause_) return;
  lock.unlock();
  const std::string other = other_call_(*stalled);
  lock.lock();
  found(other);
}

// Reports the failure, finds out which ranks still answer, and returns an error text with all known facts.
std::string NcclConnection::notify_group(const std::string& cause) {
  StoreClient& store = setup_.group->store();
  std::string text = cause;
  const std::optional<std::string> first = store.report(fmt::format("rank {}: {}", rank_, cause));
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

// ---- NCCL

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

namespace {

constexpr int kOldest = 21800;  // NCCL 2.18: has communicator configuration and its defaults

template <typename Function>
void find(void* library, Function& function, const char* symbol, bool required = true) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  if (function == nullptr && required) {
    throw BadInput("NCCL lacks {}; install version 2.18 or newer", symbol);
  }
}

NcclApi load() {
  const char* named = path_in_environment("GRADWIRE_NCCL_LIBRARY");
  const std::string library = named != nullptr ? named : "libnccl.so.2";
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    throw BadInput(
        "NCCL cannot be loaded: {}; install it, add its folder to LD_LIBRARY_PATH, or name it in "
        "GRADWIRE_NCCL_LIBRARY",
        why != nullptr ? why : library.c_str());
  }
  NcclApi api;
  find(handle, api.get_version, "ncclGetVersion");
  find(handle, api.error_string, "ncclGetErrorString");
  int version = 0;
  api.get_version(&version);
  if (version < kOldest) {
    throw BadInput("NCCL {} is too old; install version 2.18 or newer", api.version());
  }
  find(handle, api.get_unique_id, "ncclGetUniqueId");
  find(handle, api.init_rank, "ncclCommInitRankConfig");
  find(handle, api.finalize, "ncclCommFinalize");
  find(handle, api.destroy, "ncclCommDestroy");
  find(handle, api.abort, "ncclCommAbort");
  find(handle, api.async_error, "ncclCommGetAsyncError");
  find(handle, api.count, "ncclCommCount");
  find(handle, api.user_rank, "ncclCommUserRank");
  find(handle, api.device, "ncclCommCuDevice");
  find(handle, api.group_start, "ncclGroupStart");
  find(handle, api.group_end, "ncclGroupEnd");
  find(handle, api.send, "ncclSend");
  find(handle, api.receive, "ncclRecv");
  find(handle, api.split, "ncclCommSplit");
  find(handle, api.all_reduce, "ncclAllReduce");
  find(handle, api.last_error, "ncclGetLastError", false);
  find(handle, api.shrink, "ncclCommShrink", false);
  find(handle, api.revoke, "ncclCommRevoke", false);
  return api;
}

}  // namespace

std::string NcclApi::text(ncclResult_t result, ncclComm_t comm) const {
  std::string text = error_string(result);
  const char* more = last_error != nullptr ? last_error(comm) : nullptr;
  if (more != nullptr && *more != '\0') text += fmt::format(" ({})", more);
  return text;
}

std::string NcclApi::version() const {
  int v = 0;
  get_version(&v);
  return fmt::format("{}.{}.{}", v / 10000, v / 100 % 100, v % 100);
}

const NcclApi& NcclApi::loaded() {
  static const NcclApi api = load();  // if load() throws, the next call retries
  return api;
}

}  // namespace gradwire

#endif  // GRADWIRE_HAS_NCCL
