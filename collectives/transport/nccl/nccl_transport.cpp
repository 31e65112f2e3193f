#ifdef GRADWIRE_HAS_NCCL

#include "collectives/transport/nccl/nccl_transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "collectives/transport/run_with_deadline.h"
#include "runtime/util/error.h"
#include "runtime/util/mix.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

// How long NCCL may take to shut down a communicator whose peers are all healthy.
constexpr milliseconds kFarewell{10'000};

}  // namespace

bool NcclTransport::Use::enter(milliseconds patience) {
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

void NcclTransport::Use::leave() {
  std::lock_guard lock(mutex);
  busy = false;
  if (waiting > 0) changed.notify_all();
}

Transport::Place NcclTransport::place_of(const NcclSetup& setup) {
  int rank = 0, world = 1;
  if (setup.api->user_rank(setup.comm, &rank) != ncclSuccess ||
      setup.api->count(setup.comm, &world) != ncclSuccess) {
    throw BadInput("this is not a working NCCL communicator; pass one that has not failed");
  }
  return {rank, world, setup.device};
}

NcclTransport::NcclTransport(NcclSetup setup)
    : Transport("nccl", place_of(setup)),
      setup_(std::move(setup)),
      api_(*setup_.api),
      watched_(setup_.timeout.count() > 0),
      comm_(setup_.comm),
      in_flight_(setup_.timeout) {
  met_.resize(static_cast<size_t>(world()));
  standing_ = in_flight_.standing();
  if (watched_) watcher_ = Thread("the thread that watches NCCL", [this] { watch(); });
  try {
    join_watches();
  } catch (...) {
    std::lock_guard lock(mutex_);
    stop_ = true;  // ends the watcher, which its thread's destructor joins
    changed_.notify_all();
    throw;
  }
}

void NcclTransport::join_watches() {
  if (setup_.group) {
    setup_.group->store().watch([this](const std::string& cause) { heard(cause, true); },
                                [this] {
                                  std::lock_guard lock(mutex_);
                                  return standing_;
                                });
  }
  if (setup_.regrouping) {
    setup_.regrouping->quorum->enter(
        rank(), setup_.regrouping->contacts, [this](const std::string& why) { heard(why, true); },
        [this](const std::string& line) { return setup_.group->store().note(line); });
  }
}

NcclTransport::~NcclTransport() {
  if (setup_.regrouping) setup_.regrouping->quorum->leave();
  bool failed = false;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    failed = cause_ || !failure_.empty();
    changed_.notify_all();
  }
  if (watched_ && failed) {
    std::unique_lock lock(use_->mutex);
    if (!use_->changed.wait_for(lock, kFarewell, [&] { return use_->ended; })) watcher_.detach();
  }
  watcher_.join();
  release_shared();  // while the communicator exists
  {
    std::lock_guard lock(use_->mutex);
    use_->closed = true;  // memory may outlive the transport
  }
  // Announces an orderly departure before hanging up.
  if (setup_.group) setup_.group->leave();
  const ncclComm_t comm = comm_;
  if (!setup_.owned || comm == nullptr) return;
  auto farewell = [&api = api_, gpu = setup_.gpu, pause = setup_.pause, comm, revoked = revoked_.load(),
                   abort = !revoked_ && (failed || !drained())] {
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

// Returns whether all exchanges have ended. Finalizing would wait for them without a limit.
bool NcclTransport::drained() {
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

std::string NcclTransport::doing(const std::string& what) const {
  return calls_ == 0 ? what : fmt::format("call {}, {}", calls_, what);
}

void NcclTransport::throw_if_failed(const std::string& what) {
  std::unique_lock lock(mutex_);
  // Wait for the final text of a failure that is still being handled.
  changed_.wait(lock, [&] { return !cause_ || !failure_.empty(); });
  if (!failure_.empty()) throw CommError(fmt::format("rank {}: {}: {}", rank(), what, failure_));
}

void NcclTransport::heard(const std::string& cause, bool from_group) {
  std::lock_guard lock(mutex_);
  if (!failure_.empty() || cause_) return;
  if (watched_) {
    cause_ = cause;
    cause_from_group_ = from_group;
  } else {
    failure_ = cause;
  }
  changed_.notify_all();
}

void NcclTransport::give_up(const std::string& what, const std::string& cause) {
  heard(fmt::format("{}: {}", what, cause), false);
  throw_if_failed(what);
  throw CommError(fmt::format("rank {}: {}: {}", rank(), what, cause));
}

// Compares this call with the predecessor's; around the ring, that compares all ranks. If the predecessor had
// already compared its own call, the mismatch is found when this rank's exchange makes no progress.
void NcclTransport::compare(const Call& call) {
  struct Comparing {
    explicit Comparing(std::atomic<bool>& flag) : flag(flag) { flag = true; }
    ~Comparing() { flag = false; }
    std::atomic<bool>& flag;
  } comparing(comparing_);
  const std::string mine = fmt::format("{} {}", rolling_, call.what);
  StoreClient& store = setup_.group->store();
  const int previous = (rank() + world() - 1) % world();
  std::string theirs;
  try {
    store.set(fmt::format("call/{}", calls_), fmt::format("{} {} {}", rolling_, rank(), call.what));
    store.set(fmt::format("call/{}/{}", calls_, rank()), mine);
    theirs = store.get(fmt::format("call/{}/{}", calls_, previous), SteadyClock::now() + setup_.timeout,
                       fmt::format("waiting for rank {} to make this call", previous));
  } catch (const CommError& error) {
    give_up(doing(call.what), error.what());
  }
  if (theirs == mine) return;
  const std::string their_call = theirs.substr(theirs.find(' ') + 1);
  give_up(
      doing(call.what),
      fmt::format("ranks disagree: rank {} makes call {}, {}{}", previous, calls_, their_call,
                  their_call == call.what ? "; this call or an earlier one differs in something else" : ""));
}

// Describes another rank's call that differs from the call stalled in `stalled`; empty if none is known.
std::string NcclTransport::other_call(const WatchedExchange& stalled) {
  if (comparing_) return "";
  try {
    std::istringstream found(setup_.group->store().look(fmt::format("call/{}", stalled.call)));
    uint64_t hash = 0;
    int rank = 0;
    std::string what;
    if (!(found >> hash >> rank >> std::ws && std::getline(found, what)) || hash == stalled.calls_hash)
      return "";
    return fmt::format("{}: ranks disagree: rank {} makes call {}, {}", stalled.what, rank, stalled.call,
                       what);
  } catch (const CommError&) {
    return "";
  }
}

void NcclTransport::begin_set_up(const std::string& what) {
  throw_if_failed(what);
  if (world() == 1) return;
  ++calls_;
  call_ = what;
  uint64_t hash = 0x736574;
  for (const char c : what) hash = mix(hash, static_cast<uint64_t>(c));
  rolling_ = mix(rolling_, hash);
  if (setup_.group) compare({hash, what});
}

void NcclTransport::begin_call(const Stream&, const Call& call) {
  if (world() == 1) return;
  throw_if_failed(call.what);
  ++calls_;
  rolling_ = mix(rolling_, call.hash);
  call_ = call.what;
  if (setup_.group && known_calls_.insert(call.hash).second) compare(call);
}

std::unique_ptr<ExchangeMark> NcclTransport::mark_for(const Stream& stream) {
  if (setup_.gpu->capturing(stream)) return setup_.gpu->make_captured_mark(stream);
  {
    std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      auto mark = std::move(spare_.back());
      spare_.pop_back();
      return mark;
    }
  }
  return setup_.gpu->make_mark();
}

void NcclTransport::exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                             const ExchangeLabel& label) {
  if (transfers.empty()) return;
  for (const Transfer& t : transfers) {
    if (t.peer < 0 || t.peer >= world() || t.peer == rank()) {
      throw BadInput(fmt::format("{}: rank {} cannot exchange with rank {}", label.what, rank(), t.peer));
    }
  }
  uint64_t bytes = 0;
  for (const Transfer& t : transfers) bytes += t.kind == Transfer::Kind::send ? t.bytes : 0;
  const bool first = meets(transfers);
  post(stream, label.what, transfers, bytes, first,
       [&api = api_, native = setup_.gpu->native(stream), given = &transfers,
        own = first ? transfers : std::vector<Transfer>()](ncclComm_t comm, const NcclPatience& patience) {
         return run_nccl_group(api, comm, native, own.empty() ? *given : own, patience);
       });
}

void NcclTransport::allreduce(const Stream& stream, const float* in, float* out, int64_t count, bool mean,
                              uint64_t bytes, const std::string& what) {
  const bool first = !std::exchange(met_library_, true);
  post(stream, what, from_all(0, world(), bytes), bytes, first,
       [&api = api_, native = setup_.gpu->native(stream), in, out, count, mean](
           ncclComm_t comm, const NcclPatience& patience) {
         return run_nccl_allreduce(api, comm, native, in, out, count, mean, patience);
       });
}

std::vector<Transfer> NcclTransport::from_all(int first, int ranks, uint64_t bytes) const {
  std::vector<Transfer> transfers;
  for (int peer = first; peer < first + ranks; ++peer) {
    if (peer == rank()) continue;
    transfers.push_back({Transfer::Kind::receive, peer, nullptr, bytes / static_cast<uint64_t>(ranks - 1)});
  }
  return transfers;
}

void NcclTransport::post(const Stream& stream, const std::string& what_for,
                         const std::vector<Transfer>& transfers, uint64_t bytes, bool first,
                         const NcclCall& call) {
  ++exchanges_;
  const std::string what = doing(what_for);
  throw_if_failed(what);
  std::unique_ptr<ExchangeMark> mark;
  if (watched_) mark = mark_for(stream);
  if (mark) mark->begin(stream);
  const ncclResult_t result = enqueue(what, transfers, first, call);
  if (result == ncclInProgress || failing()) {
    throw_if_failed(what);
    give_up(what, fmt::format("no progress for {} ms while connecting: {}", setup_.timeout.count(),
                              pending_text(transfers)));
  }
  if (result != ncclSuccess) {
    give_up(what, fmt::format("NCCL: {}: {}", api_.text(result, nullptr), pending_text(transfers)));
  }
  count_sent(bytes);
  if (!mark) return;
  mark->end(stream);
  keep_watch(std::move(mark), what, transfers);
}

void NcclTransport::keep_watch(std::unique_ptr<ExchangeMark> mark, const std::string& what,
                               std::vector<Transfer> transfers) {
  std::lock_guard lock(mutex_);
  const bool was_idle = !in_flight_.active();
  in_flight_.add(std::move(mark), {exchanges_, what, std::move(transfers), calls_, rolling_});
  if (was_idle) changed_.notify_all();
}

bool NcclTransport::failing() {
  std::lock_guard lock(mutex_);
  return cause_.has_value() || !failure_.empty();
}

bool NcclTransport::meets(const std::vector<Transfer>& transfers) {
  bool first = false;
  for (const Transfer& t : transfers) {
    if (t.bytes == 0) continue;
    Met& met = met_[static_cast<size_t>(t.peer)];
    bool& known = t.kind == Transfer::Kind::send ? met.sent : met.received;
    first = first || !known;
    known = true;
  }
  return first;
}

// Returns ncclInProgress if there was no progress until the deadline or the group has failed meanwhile.
ncclResult_t NcclTransport::enqueue(const std::string& what, const std::vector<Transfer>& transfers,
                                    bool first, const NcclCall& call) {
  const auto deadline = watched_ ? SteadyClock::now() + setup_.timeout : SteadyClock::time_point::max();
  if (watched_ && first) {
    // NCCL connects now and waits for the peers. That call cannot always be ended, so it runs with a
    // deadline.
    struct Meeting {
      ncclResult_t result = ncclInProgress;
      std::atomic<bool> given_up{false};
      Turn turn;
      explicit Meeting(const std::shared_ptr<Use>& use, milliseconds patience) : turn(use, patience) {}
    };
    const auto meeting = std::make_shared<Meeting>(use_, setup_.timeout);
    if (!meeting->turn.entered) return ncclInProgress;
    auto meet = [meeting, call, gpu = setup_.gpu, pause = setup_.pause, comm = comm_.load(), deadline] {
      gpu->enter_thread();
      meeting->result = call(
          comm, {.deadline = deadline, .stop = [&] { return meeting->given_up.load(); }, .pause = pause});
    };
    const bool returned = run_with_deadline(std::move(meet), deadline, [this] { return failing(); });
    if (returned) return meeting->result;
    meeting->given_up = true;
    return ncclInProgress;
  }
  const Turn turn(use_, watched_ ? setup_.timeout : kFarewell);
  if (!turn.entered) return ncclInProgress;
  const NcclPatience patience{
      .deadline = deadline, .stop = [this] { return failing(); }, .pause = setup_.pause};
  if (!watched_) return call(comm_, patience);
  {
    std::lock_guard lock(mutex_);
    in_nccl_ = {SteadyClock::now(), &what, &transfers};
  }
  const ncclResult_t result = call(comm_, patience);
  std::lock_guard lock(mutex_);
  in_nccl_.reset();
  return result;
}

void NcclTransport::barrier() {
  throw_if_failed("at a barrier");
  if (setup_.group) {
    try {
      setup_.group->barrier();
    } catch (const CommError& error) {
      give_up("at a barrier", error.what());
    }
    return;
  }
  if (world() == 1) return;
  // One byte from every rank to every other.
  const Stream stream = Stream::create(setup_.device, "barrier");
  Buffer bytes(setup_.device, static_cast<size_t>(world()));
  fill_zero(stream, bytes.data(), bytes.bytes());
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank()) continue;
    transfers.push_back({Transfer::Kind::send, peer, bytes.as<char>() + rank(), 1});
    transfers.push_back({Transfer::Kind::receive, peer, bytes.as<char>() + peer, 1});
  }
  exchange(stream, transfers, {mix(0, 0x626172), "barrier"});
  uncount_sent(static_cast<uint64_t>(world() - 1));
  stream.synchronize();  // cannot hang: the watching thread or the communicator's owner aborts it
  throw_if_failed("at a barrier");
}

void NcclTransport::abort(const std::string& reason) {
  heard(fmt::format("rank {} gave up: {}", rank(), reason), false);
}

void NcclTransport::check() {
  const std::string what = doing(call_.empty() ? "between calls" : call_);
  throw_if_failed(what);
  std::string reported;
  {
    std::lock_guard lock(mutex_);
    reported = reported_by_kernels();
  }
  if (!reported.empty()) give_up(what, reported);
  if (const std::string text = nccl_error(kLookEvery); !text.empty()) give_up(what, text);
}

void NcclTransport::send_message(const std::string& message) {
  try {
    setup_.group->send_message(message);
  } catch (const CommError& error) {
    give_up("reporting to rank 0", error.what());
  }
}

std::string NcclTransport::take_message(int from) {
  try {
    return setup_.group->take_message(from);
  } catch (const CommError& error) {
    give_up(fmt::format("waiting for rank {}'s report", from), error.what());
  }
}

NcclSetup NcclTransport::without(std::vector<int> excluded) {
  return *derive(fmt::format("shrinking to {} ranks", world() - static_cast<int>(excluded.size())),
                 [&api = api_, excluded](ncclComm_t parent, ncclComm_t* child, ncclConfig_t* config) mutable {
                   return api.shrink(parent, excluded.data(), static_cast<int>(excluded.size()), child,
                                     config, 0);
                 });
}

std::unique_ptr<Transport> NcclTransport::split(const std::vector<int>& members) {
  throw_if_failed("splitting the group");
  const auto me = std::find(members.begin(), members.end(), rank());
  const int color = members.empty() ? NCCL_SPLIT_NOCOLOR : members.front();
  auto part = derive(fmt::format("making a group of {} of {} ranks", members.size(), world()),
                     [&api = api_, color, key = static_cast<int>(me - members.begin())](
                         ncclComm_t parent, ncclComm_t* child, ncclConfig_t* config) {
                       return api.split(parent, color, key, child, config);
                     });
  return part ? std::make_unique<NcclTransport>(std::move(*part)) : nullptr;
}

NcclSetup NcclTransport::again() {
  return *derive(fmt::format("making a new group of all {} ranks", world()),
                 [&api = api_, rank = rank()](ncclComm_t parent, ncclComm_t* child, ncclConfig_t* config) {
                   return api.split(parent, 0, rank, child, config);
                 });
}

std::optional<NcclSetup> NcclTransport::derive(
    const std::string& doing,
    const std::function<ncclResult_t(ncclComm_t parent, ncclComm_t* child, ncclConfig_t* config)>& make) {
  const auto deadline = SteadyClock::now() + std::max(setup_.timeout, milliseconds(1000));
  const ncclComm_t parent = comm_;
  if (parent == nullptr)
    throw CommError(fmt::format("rank {}: {}: the communicator was aborted", rank(), doing));
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
  if (!returned || deriving->result != ncclSuccess) {
    if (returned && deriving->child != nullptr) api_.abort(deriving->child);
    const bool late = !returned || deriving->result == ncclInProgress;
    throw CommError(
        fmt::format("rank {}: {}: {}", rank(), doing,
                    late ? "no progress until the deadline" : api_.text(deriving->result, parent)));
  }
  if (deriving->child == nullptr) return std::nullopt;
  return NcclSetup{.api = setup_.api,
                   .gpu = setup_.gpu,
                   .comm = deriving->child,
                   .shrinkable = setup_.shrinkable,
                   .device = setup_.device,
                   .timeout = setup_.timeout,
                   .pause = setup_.pause};
}

}  // namespace gradwire

#endif  // GRADWIRE_HAS_NCCL
