#ifdef GRADWIRE_HAS_NCCL

#include "collectives/transport/nccl/nccl_transport.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "runtime/util/error.h"
#include "runtime/util/hash.h"

namespace gradwire {

Transport::Place NcclTransport::place_of(const NcclSetup& setup) {
  Place place{.rank = 0, .world = 1, .device = setup.device, .timeout = setup.timeout};
  require(setup.api->user_rank(setup.comm, &place.rank) == ncclSuccess &&
              setup.api->count(setup.comm, &place.world) == ncclSuccess,
          "this is not a working NCCL communicator; pass one that has not failed");
  return place;
}

NcclTransport::NcclTransport(NcclSetup setup)
    : Transport("nccl", place_of(setup)),
      setup_(std::move(setup)),
      connected_(2 * static_cast<size_t>(world())),
      connection_(setup_, rank(), [this](const WatchedExchange& stalled) { return other_call(stalled); }) {
  if (setup_.group) {
    setup_.group->store().watch([this](const std::string& cause) { connection_.fail(cause, true); },
                                [this] { return connection_.standing(); });
  }
  if (setup_.quorum) {
    setup_.quorum->enter(
        rank(), setup_.contacts, [this](const std::string& why) { connection_.fail(why, true); },
        [this](const std::string& line) { return setup_.group->store().note(line); });
  }
}

NcclTransport::~NcclTransport() {
  if (setup_.quorum) setup_.quorum->leave();
  connection_.stop();
  // Announce an orderly departure before hanging up.
  if (setup_.group) setup_.group->leave();
  connection_.destroy();
}

// ---- Calls

// Compares the call with the predecessor rank's call if the call's hash is new. As every rank compares with
// its predecessor, all ranks are compared. If the predecessor had already compared its call, the mismatch is
// found when this rank's exchange makes no progress.
void NcclTransport::begin_call(const Stream&, const Call& call) {
  if (world() == 1) return;
  connection_.throw_if_failed(call.what);
  ++calls_;
  calls_hash_ = mix(calls_hash_, call.hash);
  current_ = call.what;
  if (!setup_.group || !known_.insert(call.hash).second) return;
  const std::string cause = compare_call(call.what);
  if (!cause.empty()) connection_.give_up(in_this_call(call.what), cause);
}

std::string NcclTransport::in_this_call(const std::string& what) const {
  return calls_ == 0 ? what : fmt::format("call {}, {}", calls_, what);
}

// Returns why the group has failed; "" if this rank's call and its predecessor's agree.
std::string NcclTransport::compare_call(const std::string& what) {
  const std::string mine = fmt::format("{} {}", calls_hash_, what);
  StoreClient& store = setup_.group->store();
  const int previous = (rank() + world() - 1) % world();
  std::string theirs, failed;
  comparing_ = true;
  try {
    store.set(fmt::format("call/{}", calls_), fmt::format("{} {} {}", calls_hash_, rank(), what));
    store.set(fmt::format("call/{}/{}", calls_, rank()), mine);
    theirs = store.get(fmt::format("call/{}/{}", calls_, previous), SteadyClock::now() + setup_.timeout,
                       fmt::format("waiting for rank {} to make this call", previous));
  } catch (const CommError& error) {
    failed = error.what();
  } catch (...) {
    comparing_ = false;
    throw;
  }
  comparing_ = false;
  if (!failed.empty() || theirs == mine) return failed;
  const std::string their_call = theirs.substr(theirs.find(' ') + 1);
  return fmt::format("ranks disagree: rank {} makes call {}, {}{}", previous, calls_, their_call,
                     their_call == what ? "; this call or an earlier one differs in something else" : "");
}

// Describes another rank's call that differs from the call of the exchange `stalled`; "" if no such call is
// known. Runs on the watching thread.
std::string NcclTransport::other_call(const WatchedExchange& stalled) const {
  if (comparing_ || !setup_.group) return "";
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

// ---- Exchanges

void NcclTransport::exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                             const ExchangeLabel& label) {
  if (transfers.empty()) return;
  uint64_t bytes = 0;
  for (const Transfer& t : transfers) {
    require(t.peer >= 0 && t.peer < world() && t.peer != rank(), "{}: rank {} cannot exchange with rank {}",
            label.what, rank(), t.peer);
    if (t.kind == Transfer::Kind::send) bytes += t.bytes;
  }
  send_and_receive(stream, label.what, transfers);
  count_sent(bytes);
}

void NcclTransport::send_and_receive(const Stream& stream, const std::string& what,
                                     const std::vector<Transfer>& transfers) {
  bool first = false;  // some transfer is the first to or from its peer
  for (const Transfer& t : transfers) {
    if (t.bytes == 0) continue;
    const size_t at = 2 * static_cast<size_t>(t.peer) + (t.kind == Transfer::Kind::send ? 0 : 1);
    first = first || !connected_[at];
    connected_[at] = true;
  }
  post(stream, what, transfers, first,
       [&api = *setup_.api, native = setup_.gpu->native(stream), given = &transfers,
        own = first ? transfers : std::vector<Transfer>()](ncclComm_t comm, const NcclPatience& patience) {
         ncclResult_t result = api.group_start();
         if (result != ncclSuccess) return result;
         for (const Transfer& t : own.empty() ? *given : own) {
           if (t.bytes == 0 || result != ncclSuccess) continue;
           result = t.kind == Transfer::Kind::send
                        ? api.send(t.data, t.bytes, ncclUint8, t.peer, comm, native)
                        : api.receive(t.data, t.bytes, ncclUint8, t.peer, comm, native);
           if (result == ncclInProgress) result = ncclSuccess;  // group_end() returns the real result
         }
         const ncclResult_t ended = api.group_end();  // even after an error
         return settle_nccl(api, comm, result == ncclSuccess ? ended : result, patience);
       });
}

void NcclTransport::allreduce(const Stream& stream, const float* in, float* out, int64_t count, bool mean,
                              uint64_t bytes, const std::string& what) {
  std::vector<Transfer> receives;  // describe the call in error texts: equal parts from all other ranks
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank()) continue;
    receives.push_back({Transfer::Kind::receive, peer, nullptr, bytes / static_cast<uint64_t>(world() - 1)});
  }
  post(stream, what, receives, !std::exchange(allreduce_connected_, true),
       [&api = *setup_.api, native = setup_.gpu->native(stream), in, out, count, mean](
           ncclComm_t comm, const NcclPatience& patience) {
         const ncclResult_t result = api.all_reduce(in, out, static_cast<size_t>(count), ncclFloat32,
                                                    mean ? ncclAvg : ncclSum, comm, native);
         return settle_nccl(api, comm, result, patience);
       });
  count_sent(bytes);
}

void NcclTransport::post(const Stream& stream, const std::string& what,
                         const std::vector<Transfer>& transfers, bool first,
                         const NcclConnection::Call& call) {
  connection_.post(stream, {++exchanges_, in_this_call(what), transfers, calls_, calls_hash_}, first, call);
}

void NcclTransport::barrier() {
  constexpr const char* kDoing = "at a barrier";
  connection_.throw_if_failed(kDoing);
  if (setup_.group) {
    try {
      setup_.group->barrier();
    } catch (const CommError& error) {
      connection_.give_up(kDoing, error.what());
    }
    return;
  }
  if (world() == 1) return;
  const Stream stream = Stream::create(device(), "barrier");
  Buffer all(device(), static_cast<size_t>(world()));  // a byte of each rank
  fill_zero(stream, all.data(), all.bytes());
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank()) continue;
    transfers.push_back({Transfer::Kind::send, peer, all.as<uint8_t>() + rank(), 1});
    transfers.push_back({Transfer::Kind::receive, peer, all.as<uint8_t>() + peer, 1});
  }
  send_and_receive(stream, "barrier", transfers);
  stream.synchronize();  // cannot hang: the watching thread or the communicator's owner aborts it
  connection_.throw_if_failed(kDoing);
}

void NcclTransport::abort(const std::string& reason) {
  connection_.fail(fmt::format("rank {} gave up: {}", rank(), reason));
}

void NcclTransport::check() {
  constexpr std::chrono::milliseconds kPatience{20};
  const std::string what = in_this_call(current_.empty() ? "between calls" : current_);
  connection_.throw_if_failed(what);
  if (const std::string text = connection_.error(kPatience); !text.empty()) connection_.give_up(what, text);
}

void NcclTransport::send_message(const std::string& message) {
  if (!setup_.group) return Transport::send_message(message);
  try {
    setup_.group->store().send_message(message);
  } catch (const CommError& error) {
    connection_.give_up("reporting to rank 0", error.what());
  }
}

std::string NcclTransport::take_message(int from) {
  if (!setup_.group) return Transport::take_message(from);
  try {
    return setup_.group->take_message(from);
  } catch (const CommError& error) {
    connection_.give_up(fmt::format("waiting for rank {}'s report", from), error.what());
  }
}

// ---- Other groups

std::unique_ptr<Transport> NcclTransport::split(const std::vector<int>& members) {
  connection_.throw_if_failed("splitting the group");
  const auto me = std::find(members.begin(), members.end(), rank());
  const int color = members.empty() ? NCCL_SPLIT_NOCOLOR : members.front();
  const ncclComm_t child =
      connection_.derive(fmt::format("making a group of {} of {} ranks", members.size(), world()),
                         [&api = *setup_.api, color, key = static_cast<int>(me - members.begin())](
                             ncclComm_t parent, ncclComm_t* made, ncclConfig_t* config) {
                           return api.split(parent, color, key, made, config);
                         });
  return child != nullptr ? std::make_unique<NcclTransport>(derived(child)) : nullptr;
}

NcclSetup NcclTransport::derived(ncclComm_t comm) const {
  return NcclSetup{.api = setup_.api,
                   .gpu = setup_.gpu,
                   .comm = comm,
                   .shrinkable = setup_.shrinkable,
                   .device = setup_.device,
                   .timeout = setup_.timeout,
                   .pause = setup_.pause};
}

std::vector<std::string> exchange_contacts(Membership& group, const Quorum* quorum,
                                           SteadyClock::time_point deadline) {
  group.store().set(fmt::format("quorum/{}", group.rank()), quorum == nullptr ? "" : quorum->contact());
  if (quorum == nullptr) return {};
  std::vector<std::string> contacts;
  for (int r = 0; r < group.world(); ++r) {
    contacts.push_back(group.store().get(fmt::format("quorum/{}", r), deadline,
                                         fmt::format("waiting for rank {} to join", r)));
    require_contact(group.rank(), r, contacts.back());
  }
  return contacts;
}

// The survivors, which are processes with GPUs, find each other through their quorum, join a new store, and
// derive a new NCCL communicator from the old communicator, which the failure has revoked.
std::unique_ptr<Transport> NcclTransport::regroup(std::chrono::milliseconds timeout,
                                                  std::vector<int>& survivors) {
  require_regroupable(setup_.shrinkable && setup_.group, setup_.quorum != nullptr);
  if (!connection_.failing()) abort("the group continues with the ranks that are left");
  connection_.await_failure_handled();
  const auto form = [&](const GroupOptions& options, const std::vector<int>& ranks) {
    auto group = std::make_unique<Membership>(options);
    auto contacts =
        exchange_contacts(*group, setup_.quorum.get(), SteadyClock::now() + options.join_timeout());
    std::vector<int> lost;
    for (int r = 0; r < world(); ++r) {
      if (!std::binary_search(ranks.begin(), ranks.end(), r)) lost.push_back(r);
    }
    NcclSetup next = derived(connection_.derive(
        fmt::format("making a new group of {} of {} ranks", world() - static_cast<int>(lost.size()), world()),
        [&api = *setup_.api, lost, rank = rank()](ncclComm_t parent, ncclComm_t* made, ncclConfig_t* config) {
          if (lost.empty()) return api.split(parent, 0, rank, made, config);
          std::vector<int> excluded = lost;
          return api.shrink(parent, excluded.data(), static_cast<int>(excluded.size()), made, config, 0);
        }));
    next.group = std::move(group);
    next.quorum = setup_.quorum;
    next.options = setup_.options;
    next.options.rank = options.rank;
    next.options.world = options.world;
    next.address = setup_.address;
    next.contacts = std::move(contacts);
    return std::make_unique<NcclTransport>(std::move(next));
  };
  auto made = regroup_survivors(*setup_.quorum, setup_.options, setup_.address, timeout, survivors, form);
  setup_.quorum = nullptr;
  return made;
}

}  // namespace gradwire

#endif  // GRADWIRE_HAS_NCCL
