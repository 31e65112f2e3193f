#include "collectives/communicator/local_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <utility>

#include "collectives/transport/local/local.h"
#include "runtime/threads/resources.h"
#include "runtime/threads/thread.h"

namespace gradwire {
namespace {

LinkCosts costs_of(const EmulatedLink& link) {
  const LinkCosts threads;
  LinkCosts::Pattern pattern = threads.all_pairs;
  pattern.latency_us += std::chrono::duration<double, std::micro>(link.delay).count();
  pattern.bytes_per_us = std::min(pattern.bytes_per_us, link.payload_bytes_per_us());
  LinkCosts costs;
  costs.neighbour = costs.all_pairs = costs.inter_node = pattern;
  costs.intra_node = link.ranks_per_node > 1 ? threads.intra_node : pattern;
  return costs;
}

}  // namespace

std::vector<std::unique_ptr<Communicator>> create_local_ranks(const std::vector<Device>& devices,
                                                              std::chrono::milliseconds timeout,
                                                              const EmulatedLink& link) {
  if (!link) return Communicator::create_local(devices, timeout);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (auto& transport : make_local_transports(devices, timeout, link)) {
    communicators.push_back(std::make_unique<Communicator>(std::move(transport)));
    communicators.back()->set_link_costs(costs_of(link));
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
