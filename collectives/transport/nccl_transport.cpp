#ifdef GRADWIRE_HAS_NCCL

#include "collectives/transport/nccl_transport.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/error.h"
#include "runtime/mix.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLookEvery{20}, kLookWhenIdle{500};
// How long NCCL may take to shut down a communicator whose peers are all healthy.
constexpr milliseconds kFarewell{10'000};

}  // namespace

ncclComm_t init_nccl(const NcclApi& api, int rank, int world, const ncclUniqueId& id,
                     SteadyClock::time_point deadline) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = nullptr;
  ncclResult_t result = api.init_rank(&comm, world, id, rank, &config);
  while (result == ncclInProgress && SteadyClock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(1));
    if (api.async_error(comm, &result) != ncclSuccess) result = ncclInternalError;
  }
  if (result == ncclSuccess) return comm;
  const std::string why =
      result == ncclInProgress ? "no progress until the deadline" : api.text(result, comm);
  if (comm != nullptr) api.abort(comm);
  throw CommError(
      fmt::format("rank {} of {}: joining through NCCL: {}; NCCL_DEBUG=INFO says more", rank, world, why));
}

NcclTransport::NcclTransport(NcclSetup setup)
    : setup_(std::move(setup)),
      api_(*setup_.api),
      watched_(setup_.timeout.count() > 0),
      comm_(setup_.comm),
      in_flight_(setup_.timeout) {
  if (api_.user_rank(comm_, &rank_) != ncclSuccess || api_.count(comm_, &world_) != ncclSuccess) {
    throw BadInput("this is not a working NCCL communicator");
  }
  standing_ = in_flight_.standing();
  if (watched_) watcher_ = std::thread([this] { watch(); });
  if (setup_.group) {
    setup_.group->store().watch([this](const std::string& cause) { heard(cause, true); },
                                [this] {
                                  std::lock_guard lock(mutex_);
                                  return standing_;
                                });
  }
}

NcclTransport::~NcclTransport() {
  bool failed = false;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    failed = cause_ || !failure_.empty();
    changed_.notify_all();
  }
  if (watched_ && failed) {
    std::unique_lock lock(ended_->mutex);
    if (!ended_->changed.wait_for(lock, kFarewell, [&] { return ended_->done; })) watcher_.detach();
  }
  if (watcher_.joinable()) watcher_.join();
  // Announces an orderly departure before hanging up.
  if (setup_.group) setup_.group->leave();
  if (!setup_.owned || comm_ == nullptr) return;
  const auto deadline = SteadyClock::now() + kFarewell;
  if (revoked_) {
    settle(comm_, ncclInProgress, deadline, [] { return false; });
    api_.destroy(comm_);
  } else if (!failed && settle(comm_, api_.finalize(comm_), deadline, [] { return false; }) == ncclSuccess) {
    api_.destroy(comm_);
  } else {
    api_.abort(comm_);
  }
}

std::string NcclTransport::doing(const std::string& what) const {
  return calls_ == 0 ? what : fmt::format("call {}, {}", calls_, what);
}

void NcclTransport::throw_if_failed(const std::string& what) {
  std::unique_lock lock(mutex_);
  // A failure that is still being handled counts: wait for its final text.
  changed_.wait(lock, [&] { return !cause_ || !failure_.empty(); });
  if (!failure_.empty()) throw CommError(fmt::format("rank {}: {}: {}", rank_, what, failure_));
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
  throw CommError(fmt::format("rank {}: {}: {}", rank_, what, cause));
}

ncclResult_t NcclTransport::settle(ncclComm_t comm, ncclResult_t result, SteadyClock::time_point deadline,
                                   const std::function<bool()>& stop) {
  auto pause = std::chrono::microseconds(1);
  while (result == ncclInProgress && !stop() && SteadyClock::now() < deadline) {
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::microseconds(500));
    std::lock_guard lock(nccl_mutex_);
    if (comm_ == nullptr) break;  // aborted by the watching thread
    if (api_.async_error(comm, &result) != ncclSuccess) result = ncclInternalError;
  }
  return result;
}

// Each rank compares with its predecessor; around the ring, that compares all of them.
void NcclTransport::compare(const Call& call) {
  const std::string mine = fmt::format("{} {}", rolling_, call.what);
  StoreClient& store = setup_.group->store();
  const int previous = (rank_ + world_ - 1) % world_;
  std::string theirs;
  try {
    store.set(fmt::format("call/{}/{}", calls_, rank_), mine);
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

void NcclTransport::begin(const Stream&, const Call& call) {
  if (world_ == 1) return;
  throw_if_failed(call.what);
  ++calls_;
  rolling_ = mix(rolling_, call.hash);
  call_ = call.what;
  if (setup_.group && known_calls_.insert(call.hash).second) compare(call);
}

std::unique_ptr<ExchangeMark> NcclTransport::mark_for(const Stream& stream) {
  if (setup_.gpu->capturing(stream)) return setup_.gpu->make_captured_mark();
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
    if (t.peer < 0 || t.peer >= world_ || t.peer == rank_) {
      throw BadInput(fmt::format("{}: rank {} cannot exchange with rank {}", label.what, rank_, t.peer));
    }
  }
  ++exchanges_;
  const std::string what = doing(label.what);
  throw_if_failed(what);
  const auto deadline = watched_ ? SteadyClock::now() + setup_.timeout : SteadyClock::time_point::max();
  const cudaStream_t native = setup_.gpu->native(stream);
  std::unique_ptr<ExchangeMark> mark;
  if (watched_) mark = mark_for(stream);
  if (mark) mark->begin(stream);
  ncclResult_t result = ncclSuccess;
  uint64_t bytes = 0;
  ncclComm_t comm = nullptr;
  {
    std::lock_guard lock(nccl_mutex_);
    comm = comm_;
    if (comm != nullptr && !revoked_) {
      result = api_.group_start();
      for (const Transfer& t : transfers) {
        if (t.bytes == 0 || result != ncclSuccess) continue;
        if (t.kind == Transfer::Kind::send) {
          result = api_.send(t.data, t.bytes, ncclUint8, t.peer, comm, native);
          bytes += t.bytes;
        } else {
          result = api_.receive(t.data, t.bytes, ncclUint8, t.peer, comm, native);
        }
        if (result == ncclInProgress) result = ncclSuccess;  // the end of the group reports the real result
      }
      const ncclResult_t ended = api_.group_end();
      if (result == ncclSuccess) result = ended;
    }
  }
  auto failed = [this] {
    std::lock_guard lock(mutex_);
    return cause_.has_value() || !failure_.empty();
  };
  result = settle(comm, result, deadline, failed);
  if (result == ncclInProgress || failed()) {
    throw_if_failed(what);
    give_up(what, fmt::format("no progress for {} ms while connecting: {}", setup_.timeout.count(),
                              pending_text(transfers)));
  }
  if (result != ncclSuccess) {
    give_up(what, fmt::format("NCCL: {}: {}", api_.text(result, nullptr), pending_text(transfers)));
  }
  bytes_sent_.fetch_add(bytes, std::memory_order_relaxed);
  if (!mark) return;
  mark->end(stream);
  std::lock_guard lock(mutex_);
  const bool was_idle = !in_flight_.active();
  in_flight_.add(std::move(mark), {exchanges_, what, pending_text(transfers)});
  if (was_idle) changed_.notify_all();
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
  if (world_ == 1) return;
  // One byte from every rank to every other.
  const Stream stream = Stream::create(setup_.device, "barrier");
  Buffer bytes(setup_.device, static_cast<size_t>(world_));
  fill_zero(stream, bytes.data(), bytes.bytes());
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < world_; ++peer) {
    if (peer == rank_) continue;
    transfers.push_back({Transfer::Kind::send, peer, bytes.as<char>() + rank_, 1});
    transfers.push_back({Transfer::Kind::receive, peer, bytes.as<char>() + peer, 1});
  }
  exchange(stream, transfers, {mix(0, 0x626172), "barrier"});
  bytes_sent_.fetch_sub(static_cast<uint64_t>(world_ - 1), std::memory_order_relaxed);  // no payload
  stream.synchronize();  // cannot hang: the watching thread or the communicator's owner aborts it
  throw_if_failed("at a barrier");
}

void NcclTransport::abort(const std::string& reason) {
  heard(fmt::format("rank {} gave up: {}", rank_, reason), false);
}

void NcclTransport::check() {
  const std::string what = doing(call_.empty() ? "between calls" : call_);
  throw_if_failed(what);
  if (const std::string text = nccl_error(); !text.empty()) give_up(what, text);
}

void NcclTransport::send_message(const std::string& message) {
  if (!setup_.group) return Transport::send_message(message);
  try {
    setup_.group->send_message(message);
  } catch (const CommError& error) {
    give_up("reporting to rank 0", error.what());
  }
}

std::string NcclTransport::take_message(int from) {
  if (!setup_.group) return Transport::take_message(from);
  try {
    return setup_.group->take_message(from);
  } catch (const CommError& error) {
    give_up(fmt::format("waiting for rank {}'s report", from), error.what());
  }
}

void NcclTransport::watch() {
  setup_.gpu->enter_thread();
  const milliseconds often = std::clamp(setup_.timeout / 10, milliseconds(1), kLookEvery);
  std::unique_lock lock(mutex_);
  while (!stop_ && !cause_) {
    const bool active = in_flight_.active();
    changed_.wait_for(lock, active ? often : kLookWhenIdle,
                      [&] { return stop_ || cause_ || in_flight_.active() != active; });
    if (stop_ || cause_) break;
    lock.unlock();
    const std::string text = nccl_error();
    lock.lock();
    std::optional<std::string> overdue;
    try {
      overdue = in_flight_.overdue(SteadyClock::now());
    } catch (const std::exception& error) {  // the GPU failed, and with it the marks
      overdue = error.what();
    }
    standing_ = in_flight_.standing();
    for (auto& mark : in_flight_.take_spare()) spare_.push_back(std::move(mark));
    if (!text.empty() && !cause_) cause_ = fmt::format("{}: {}", standing_, text);
    if (overdue && !cause_) cause_ = *overdue;
  }
  if (!cause_) return;
  // The group has failed; what follows shuts it down.
  const std::string cause = *cause_;
  const bool from_group = cause_from_group_;
  lock.unlock();
  std::string text = from_group || !setup_.group ? cause : tell_the_group(cause);
  lock.lock();
  // Set before the kernels stop waiting, so that a thread that synchronizes a stream finds it in check().
  failure_ = std::move(text);
  changed_.notify_all();
  lock.unlock();
  end_communicator();
}

// NCCL's own error for the communicator; empty if there is none.
std::string NcclTransport::nccl_error() {
  std::lock_guard lock(nccl_mutex_);
  if (comm_ == nullptr) return "";
  ncclResult_t result = ncclSuccess;
  if (api_.async_error(comm_, &result) != ncclSuccess) result = ncclInternalError;
  return result == ncclSuccess || result == ncclInProgress ? "" : "NCCL: " + api_.text(result, comm_);
}

// Reports the failure, finds out who still answers, and returns everything that is known.
std::string NcclTransport::tell_the_group(const std::string& cause) {
  std::string text = cause;
  const std::optional<std::string> first =
      setup_.group->store().report(fmt::format("rank {}: {}", rank_, cause));
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

// An abort may hang, so this object must not be touched after it; see the destructor.
void NcclTransport::end_communicator() {
  const NcclApi& api = api_;
  const std::shared_ptr<Ended> ended = ended_;
  ncclComm_t comm = nullptr;
  {
    std::lock_guard lock(nccl_mutex_);
    if (setup_.owned && setup_.shrinkable) {
      revoked_ = true;
      api.revoke(comm_, 0);
    } else if (setup_.owned) {
      std::swap(comm, comm_);
    }
  }
  if (comm != nullptr) api.abort(comm);
  std::lock_guard lock(ended->mutex);
  ended->done = true;
  ended->changed.notify_all();
}

std::unique_ptr<Transport> NcclTransport::shrink(const std::vector<int>& excluded) {
  if (api_.shrink == nullptr)
    throw BadInput(fmt::format("shrink needs NCCL 2.27; this is {}", api_.version()));
  std::vector<int> out = excluded;
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  if (out.empty() || out.front() < 0 || out.back() >= world_ || static_cast<int>(out.size()) >= world_) {
    throw BadInput(
        fmt::format("shrink: the excluded ranks must be some, but not all, of 0 to {}", world_ - 1));
  }
  if (std::binary_search(out.begin(), out.end(), rank_)) {
    throw BadInput(fmt::format("shrink: rank {} is excluded; only the remaining ranks call it", rank_));
  }
  // Usually called because of a failure, which may still be being handled: wait until it has been.
  try {
    throw_if_failed("shrinking");
  } catch (const CommError&) {
  }
  {
    std::lock_guard lock(nccl_mutex_);
    if (comm_ == nullptr) {
      throw BadInput(
          "shrink: the communicator was aborted; create it with NcclOptions::shrinkable so that a failure "
          "leaves it usable for this");
    }
  }
  return derive(fmt::format("shrinking to {} ranks", world_ - static_cast<int>(out.size())),
                [&](ncclComm_t parent, ncclComm_t* child, ncclConfig_t* config) {
                  return api_.shrink(parent, out.data(), static_cast<int>(out.size()), child, config, 0);
                });
}

std::unique_ptr<Transport> NcclTransport::split(const std::vector<int>& members) {
  throw_if_failed("splitting the group");
  const auto me = std::find(members.begin(), members.end(), rank_);
  const int color = members.empty() ? NCCL_SPLIT_NOCOLOR : members.front();
  return derive(fmt::format("making a group of {} of {} ranks", members.size(), world_),
                [&](ncclComm_t parent, ncclComm_t* child, ncclConfig_t* config) {
                  return api_.split(parent, color, static_cast<int>(me - members.begin()), child, config);
                });
}

std::unique_ptr<Transport> NcclTransport::derive(
    const std::string& doing,
    const std::function<ncclResult_t(ncclComm_t parent, ncclComm_t* child, ncclConfig_t* config)>& make) {
  const auto deadline = SteadyClock::now() + std::max(setup_.timeout, milliseconds(1000));
  const auto never = [] { return false; };
  ncclComm_t parent = nullptr, child = nullptr;
  auto busy = [&](ncclComm_t comm, ncclResult_t result) {
    result = settle(comm, result, deadline, never);
    if (result == ncclSuccess) return;
    if (child != nullptr) api_.abort(child);
    throw CommError(
        fmt::format("rank {}: {}: {}", rank_, doing,
                    result == ncclInProgress ? "no progress until the deadline" : api_.text(result, comm)));
  };
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclResult_t result = ncclSuccess;
  {
    std::lock_guard lock(nccl_mutex_);
    parent = comm_;
  }
  if (parent == nullptr)
    throw CommError(fmt::format("rank {}: {}: the communicator was aborted", rank_, doing));
  if (revoked_) busy(parent, ncclInProgress);  // until the revocation is complete
  {
    std::lock_guard lock(nccl_mutex_);
    result = make(parent, &child, &config);
  }
  busy(parent, result);
  if (child == nullptr) return nullptr;
  if (result == ncclInProgress) busy(child, ncclInProgress);
  return std::make_unique<NcclTransport>(NcclSetup{.api = setup_.api,
                                                   .gpu = setup_.gpu,
                                                   .comm = child,
                                                   .shrinkable = setup_.shrinkable,
                                                   .device = setup_.device,
                                                   .timeout = setup_.timeout});
}

}  // namespace gradwire

#endif  // GRADWIRE_HAS_NCCL
