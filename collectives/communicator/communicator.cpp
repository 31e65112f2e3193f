#include "collectives/communicator/communicator.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <utility>

#include "collectives/agreement/statements.h"
#include "collectives/transport/local/local.h"
#include "runtime/threads/thread.h"
#include "runtime/util/error.h"

namespace gradwire {

std::vector<std::unique_ptr<Communicator>> Communicator::create_local(const std::vector<Device>& devices,
                                                                      std::chrono::milliseconds timeout) {
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (auto& transport : make_local_transports(devices, timeout)) {
    communicators.push_back(std::make_unique<Communicator>(std::move(transport)));
    communicators.back()->set_link_costs({});
  }
  return communicators;
}

std::unique_ptr<Communicator> Communicator::create_single(Device device) {
  return std::move(create_local({device}, std::chrono::milliseconds(60'000)).front());
}

void Communicator::set_ranks_per_node(int ranks) {
  if (ranks < 0 || (ranks > 0 && world() % ranks != 0)) {
    throw BadInput("{} ranks per node do not divide a world of {} into equal nodes", ranks, world());
  }
  ranks_per_node_ = ranks;
}
void Communicator::agree_on_ranks_per_node(int ranks_here) {
  bool agreed = ranks_here > 0 && world() % ranks_here == 0;
  const Stream stream = device().is_host() ? Stream::immediate_host() : Stream::create(device(), "set-up");
  for (const int64_t theirs : all_gather_value(*transport_, stream, int64_t{ranks_here}, "ranks per node")) {
    agreed = agreed && theirs == ranks_here;
  }
  ranks_per_node_ = agreed ? ranks_here : 0;
}
const LinkCosts& Communicator::link_costs(const Stream& stream, ScheduleKind kind) {
  static const LinkCosts on_gpus, on_hosts{.slice_bytes = 384 << 10};
  if (link_costs_) return *link_costs_;
  if (kind != ScheduleKind::automatic || world() <= 2) {
    return device().is_host() ? on_hosts : on_gpus;
  }
  // A joiner has not measured. After a failure some survivors may have measured, and others not.
  const auto mine = known_ ? known_->neighbour : LinkCosts::Pattern{0, 0};
  const auto all = all_gather_value(*transport_, stream, mine, "the known costs of links");
  const bool nodes = ranks_per_node_ > 1 && ranks_per_node_ < world();
  if (known_ && std::ranges::count(all, mine) == world() &&
      (!nodes || known_->intra_node != known_->all_pairs)) {
    set_link_costs(*known_);
  } else {
    // 0.3 s and 5 %, less a quarter for the last exchanges.
    const auto timeout = transport_->timeout() / 27;
    const std::chrono::milliseconds most(220);
    link_costs_ = measure_link_costs(*transport_, stream, ranks_per_node_,
                                     timeout.count() > 0 ? std::min(timeout, most) : most);
  }
  return *link_costs_;
}
void Communicator::set_link_costs(const LinkCosts& costs) {
  link_costs_ = costs;
  // The costs may come from another group, for example from a checkpoint.
  link_costs_->library_measured = costs.library_measured && transport_->has_allreduce();
}
const Stream& Communicator::transfers() {
  if (!transfers_) transfers_ = Stream::create(device(), "transfers", Stream::Priority::high);
  return transfers_;
}
void Communicator::finish_transfers() noexcept {
  if (!transfers_) return;
  try {
    transfers_.synchronize();
  } catch (...) {
  }
}
std::unique_ptr<Communicator> Communicator::regroup(std::chrono::milliseconds timeout,
                                                    std::vector<int>& survivors) {
  return successor(transport_->regroup(timeout, survivors));
}
std::unique_ptr<Communicator> Communicator::grow() {
  return successor(transport_->grow());
}
std::unique_ptr<Communicator> Communicator::split(int color, int key) {
  const Stream stream = device().is_host() ? Stream::immediate_host() : Stream::create(device(), "set-up");
  const auto all =
      all_gather(*transport_, stream, std::vector<int64_t>{color, key}, "a split of the communicator");
  std::vector<std::pair<int64_t, int>> members;
  for (int r = 0; r < world(); ++r) {
    const std::vector<int64_t>& theirs = all[static_cast<size_t>(r)];
    if (color >= 0 && theirs[0] == color) members.emplace_back(theirs[1], r);
  }
  std::sort(members.begin(), members.end());
  std::vector<int> ranks;
  for (const auto& [_, rank] : members) ranks.push_back(rank);
  auto made = successor(transport_->split(ranks));
  if (made && link_costs_ && !link_costs_->measured) {
    made->set_link_costs(*link_costs_);
  } else if (made && made->world() < world()) {
    made->known_.reset();  // links between some of the ranks may be faster
  }
  return made;
}
std::unique_ptr<Communicator> Communicator::successor(std::unique_ptr<Transport> transport) const {
  if (transport == nullptr) return nullptr;
  auto made = std::make_unique<Communicator>(std::move(transport));
  made->known_ = link_costs_ ? link_costs_ : known_;
  return made;
}

std::vector<std::unique_ptr<Communicator>> create_local_ranks(const std::vector<Device>& devices,
                                                              std::chrono::milliseconds timeout,
                                                              const EmulatedLink& link) {
  if (!link) return Communicator::create_local(devices, timeout);
  LinkCosts costs;
  LinkCosts::Pattern pattern = costs.all_pairs;
  pattern.latency_us += std::chrono::duration<double, std::micro>(link.delay).count();
  pattern.bytes_per_us = std::min(pattern.bytes_per_us, link.payload_bytes_per_us());
  costs.neighbour = costs.all_pairs = costs.inter_node = pattern;
  if (link.ranks_per_node <= 1) costs.intra_node = pattern;
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (auto& transport : make_local_transports(devices, timeout, link)) {
    communicators.push_back(std::make_unique<Communicator>(std::move(transport)));
    communicators.back()->set_link_costs(costs);
  }
  return communicators;
}

void run_local_ranks(const std::vector<std::unique_ptr<Communicator>>& group,
                     const std::function<void(Communicator&)>& body) {
  std::mutex mutex;
  std::exception_ptr first;
  const auto failed = [&](Communicator& comm, const std::exception& error) {
    {
      std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
    comm.abort(text_of(error));
  };
  std::vector<Thread> threads;
  threads.reserve(group.size());
  for (const auto& comm : group) {
    try {
      threads.emplace_back(fmt::format("the thread of rank {}", comm->rank()), [&, mine = comm.get()] {
        try {
          body(*mine);
        } catch (const std::exception& error) {
          failed(*mine, error);
        }
      });
    } catch (const std::exception& error) {  // running ranks must not wait for this rank
      failed(*comm, error);
      break;
    }
  }
  threads.clear();  // joins the threads
  if (first) std::rethrow_exception(first);
}

}  // namespace gradwire
