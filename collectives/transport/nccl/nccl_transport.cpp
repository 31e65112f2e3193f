#ifdef GRADWIRE_HAS_NCCL

#include "collectives/transport/nccl/nccl_transport.h"

#include <algorithm>
#include <utility>

#include "runtime/util/error.h"
#include "runtime/util/hash.h"

namespace gradwire {
namespace {

std::unique_ptr<NcclCommunicator> communicator_of(const NcclSetup& setup) {
  return std::make_unique<NcclCommunicator>(*setup.api, setup.gpu, setup.comm, setup.owned, setup.shrinkable,
                                            setup.pause);
}

}  // namespace

NcclTransport::NcclTransport(NcclSetup setup) : NcclTransport{communicator_of(setup), std::move(setup)} {}

NcclTransport::NcclTransport(std::unique_ptr<NcclCommunicator> comm, NcclSetup setup)
    : Transport("nccl", {comm->rank(), comm->world(), setup.device, false, setup.timeout}),
      setup_(std::move(setup)),
      comm_(std::move(comm)),
      calls_(rank(), world(), setup_.group.get(), setup_.timeout),
      watch_(*comm_, setup_.group.get(), setup_.timeout,
             [this](const WatchedExchange& stalled) { return calls_.other_call(stalled); }),
      connected_(static_cast<size_t>(world())) {
  join_group();
}

void NcclTransport::join_group() {
  if (setup_.group) {
    setup_.group->store().watch([this](const std::string& cause) { watch_.fail(cause, true); },
                                [this] { return watch_.standing(); });
  }
  if (setup_.regrouping) {
    setup_.regrouping->quorum->enter(
        rank(), setup_.regrouping->contacts, [this](const std::string& why) { watch_.fail(why, true); },
        [this](const std::string& line) { return setup_.group->store().note(line); });
  }
}

NcclTransport::~NcclTransport() {
  if (setup_.regrouping) setup_.regrouping->quorum->leave();
  const bool failed = watch_.stop();
  // Announce an orderly departure before hanging up.
  if (setup_.group) setup_.group->leave();
  comm_->destroy([&] { return failed || !watch_.drained(); });
}

void NcclTransport::begin_call(const Stream&, const Call& call) {
  if (world() == 1) return;
  watch_.throw_if_failed(call.what);
  const std::string cause = calls_.begin(call);
  if (!cause.empty()) watch_.give_up(calls_.in_this_call(call.what), cause);
}

void NcclTransport::exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                             const ExchangeLabel& label) {
  if (transfers.empty()) return;
  uint64_t bytes = 0;
  for (const Transfer& t : transfers) {
    if (t.peer < 0 || t.peer >= world() || t.peer == rank()) {
      throw BadInput("{}: rank {} cannot exchange with rank {}", label.what, rank(), t.peer);
    }
    if (t.kind == Transfer::Kind::send) bytes += t.bytes;
  }
  const bool first = connects(transfers);
  post(stream, label.what, transfers, bytes, first,
       [&api = comm_->api(), native = comm_->gpu().native(stream), given = &transfers,
        own = first ? transfers : std::vector<Transfer>()](ncclComm_t comm, const NcclPatience& patience) {
         return run_nccl_group(api, comm, native, own.empty() ? *given : own, patience);
       });
}

void NcclTransport::allreduce(const Stream& stream, const float* in, float* out, int64_t count, bool mean,
                              uint64_t bytes, const std::string& what) {
  const bool first = !std::exchange(allreduce_connected_, true);
  std::vector<Transfer> receives;  // describe the call in error texts: equal parts from all other ranks
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank()) continue;
    receives.push_back({Transfer::Kind::receive, peer, nullptr, bytes / static_cast<uint64_t>(world() - 1)});
  }
  post(stream, what, receives, bytes, first,
       [&api = comm_->api(), native = comm_->gpu().native(stream), in, out, count, mean](
           ncclComm_t comm, const NcclPatience& patience) {
         return run_nccl_allreduce(api, comm, native, in, out, count, mean, patience);
       });
}

bool NcclTransport::connects(const std::vector<Transfer>& transfers) {
  bool first = false;
  for (const Transfer& t : transfers) {
    if (t.bytes == 0) continue;
    Connected& peer = connected_[static_cast<size_t>(t.peer)];
    bool& known = t.kind == Transfer::Kind::send ? peer.sent : peer.received;
    first = first || !known;
    known = true;
  }
  return first;
}

void NcclTransport::post(const Stream& stream, const std::string& what_for,
                         const std::vector<Transfer>& transfers, uint64_t bytes, bool first,
                         const NcclCommunicator::Call& call) {
  ++exchanges_;
  const std::string what = calls_.in_this_call(what_for);
  watch_.throw_if_failed(what);
  std::unique_ptr<ExchangeMark> mark;
  if (watch_.watches()) mark = watch_.mark_for(stream);
  if (mark) mark->begin(stream);
  const ncclResult_t result = enqueue(what, transfers, first, call);
  if (result == ncclInProgress || watch_.failing()) {
    watch_.throw_if_failed(what);
    watch_.give_up(what, fmt::format("no progress for {} ms while connecting: {}", setup_.timeout.count(),
                                     pending_text(transfers)));
  }
  if (result != ncclSuccess) {
    watch_.give_up(what,
                   fmt::format("NCCL: {}: {}", comm_->api().text(result, nullptr), pending_text(transfers)));
  }
  count_sent(bytes);
  if (!mark) return;
  mark->end(stream);
  watch(std::move(mark), what, transfers);
}

// Enqueues `call`. Returns ncclInProgress if NCCL made no progress until the deadline or the group has failed
// meanwhile.
ncclResult_t NcclTransport::enqueue(const std::string& what, const std::vector<Transfer>& transfers,
                                    bool first, const NcclCommunicator::Call& call) {
  NcclCommunicator::Limits limits{.turn = NcclCommunicator::kFarewell,
                                  .stop = [this] { return watch_.failing(); }};
  if (!watch_.watches()) return comm_->run(call, limits);
  limits.turn = setup_.timeout;
  limits.deadline = SteadyClock::now() + setup_.timeout;
  // In this call NCCL connects and waits for the peers. The call cannot always be ended, so it runs on
  // another thread.
  if (first) return comm_->run_apart(call, limits);
  return comm_->run(
      [&](ncclComm_t comm, const NcclPatience& patience) {
        return watch_.watch_call(what, transfers, [&] { return call(comm, patience); });
      },
      limits);
}

void NcclTransport::watch(std::unique_ptr<ExchangeMark> mark, const std::string& what,
                          std::vector<Transfer> transfers) {
  watch_.watch_exchange(std::move(mark),
                        {exchanges_, what, std::move(transfers), calls_.number(), calls_.hash()});
}

void NcclTransport::exchange_bytes(const Stream& stream, uint8_t* all, const ExchangeLabel& label) {
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank()) continue;
    transfers.push_back({Transfer::Kind::send, peer, all + rank(), 1});
    transfers.push_back({Transfer::Kind::receive, peer, all + peer, 1});
  }
  exchange(stream, transfers, label);
  uncount_sent(static_cast<uint64_t>(world() - 1));
}

void NcclTransport::barrier() {
  constexpr const char* kDoing = "at a barrier";
  watch_.throw_if_failed(kDoing);
  if (setup_.group) {
    try {
      setup_.group->barrier();
    } catch (const CommError& error) {
      watch_.give_up(kDoing, error.what());
    }
    return;
  }
  if (world() == 1) return;
  const Stream stream = Stream::create(device(), "barrier");
  Buffer all(device(), static_cast<size_t>(world()));
  fill_zero(stream, all.data(), all.bytes());
  exchange_bytes(stream, all.as<uint8_t>(), {mix(0, 0x626172), "barrier"});
  stream.synchronize();  // cannot hang: the watching thread or the communicator's owner aborts it
  watch_.throw_if_failed(kDoing);
}

void NcclTransport::abort(const std::string& reason) {
  watch_.fail(fmt::format("rank {} gave up: {}", rank(), reason));
}

void NcclTransport::check() {
  constexpr std::chrono::milliseconds kPatience{20};
  const std::string what = calls_.in_this_call(calls_.current().empty() ? "between calls" : calls_.current());
  watch_.throw_if_failed(what);
  if (const std::string text = comm_->error(kPatience); !text.empty()) watch_.give_up(what, text);
}

void NcclTransport::send_message(const std::string& message) {
  if (!setup_.group) return Transport::send_message(message);
  try {
    setup_.group->store().send_message(message);
  } catch (const CommError& error) {
    watch_.give_up("reporting to rank 0", error.what());
  }
}

std::string NcclTransport::take_message(int from) {
  if (!setup_.group) return Transport::take_message(from);
  try {
    return setup_.group->take_message(from);
  } catch (const CommError& error) {
    watch_.give_up(fmt::format("waiting for rank {}'s report", from), error.what());
  }
}

std::unique_ptr<Transport> NcclTransport::split(const std::vector<int>& members) {
  watch_.throw_if_failed("splitting the group");
  const auto me = std::find(members.begin(), members.end(), rank());
  const int color = members.empty() ? NCCL_SPLIT_NOCOLOR : members.front();
  const ncclComm_t child =
      comm_->derive(fmt::format("making a group of {} of {} ranks", members.size(), world()), setup_.timeout,
                    [&api = comm_->api(), color, key = static_cast<int>(me - members.begin())](
                        ncclComm_t parent, ncclComm_t* made, ncclConfig_t* config) {
                      return api.split(parent, color, key, made, config);
                    });
  return child != nullptr ? std::make_unique<NcclTransport>(derived(child)) : nullptr;
}

NcclSetup NcclTransport::without(std::vector<int> excluded) {
  const NcclApi& api = comm_->api();
  const int left = world() - static_cast<int>(excluded.size());
  return derived(comm_->derive(
      fmt::format("making a new group of {} of {} ranks", left, world()), setup_.timeout,
      [&api, excluded = std::move(excluded), rank = rank()](ncclComm_t parent, ncclComm_t* made,
                                                            ncclConfig_t* config) {
        if (excluded.empty()) return api.split(parent, 0, rank, made, config);
        std::vector<int> ranks = excluded;
        return api.shrink(parent, ranks.data(), static_cast<int>(ranks.size()), made, config, 0);
      }));
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

// Regroups after a failure. The survivors, which are processes with GPUs, find each other through their
// quorum, join a new store, and derive a new NCCL communicator from the old communicator, which the failure
// has revoked.

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

std::unique_ptr<Transport> NcclTransport::regroup(std::chrono::milliseconds timeout,
                                                  std::vector<int>& survivors) {
  require_regroupable(setup_.shrinkable && setup_.group, setup_.regrouping.has_value());
  if (!watch_.failing()) abort("the group continues with the ranks that are left");
  watch_.await_failure_handled();
  NcclQuorum& mine = *setup_.regrouping;
  const auto form = [&](const GroupOptions& options, const std::vector<int>& ranks) {
    auto group = std::make_unique<Membership>(options);
    auto contacts = exchange_contacts(*group, mine.quorum.get(), SteadyClock::now() + options.join_timeout());
    std::vector<int> lost;
    for (int r = 0; r < world(); ++r) {
      if (!std::binary_search(ranks.begin(), ranks.end(), r)) lost.push_back(r);
    }
    NcclSetup next = without(std::move(lost));
    next.group = std::move(group);
    next.regrouping = NcclQuorum{
        .quorum = mine.quorum, .group = mine.group, .address = mine.address, .contacts = std::move(contacts)};
    next.regrouping->group.rank = options.rank;
    next.regrouping->group.world = options.world;
    return std::make_unique<NcclTransport>(std::move(next));
  };
  auto made = regroup_survivors(*mine.quorum, mine.group, mine.address, timeout, survivors, form);
  setup_.regrouping.reset();
  return made;
}

}  // namespace gradwire

#endif  // GRADWIRE_HAS_NCCL
