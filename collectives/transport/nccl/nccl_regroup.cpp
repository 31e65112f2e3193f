// Regroups after a failure: the survivors of processes with GPUs find each other through their quorum, join a
// new store, and derive NCCL's communicator from the old one, which the failure has revoked.
#ifdef GRADWIRE_HAS_NCCL

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "collectives/transport/nccl/nccl_transport.h"
#include "collectives/transport/regroup.h"
#include "runtime/util/error.h"

namespace gradwire {

std::vector<std::string> exchange_contacts(Membership& group, const Quorum* quorum,
                                           SteadyClock::time_point deadline) {
  group.store().set(fmt::format("quorum/{}", group.rank()), quorum == nullptr ? "" : quorum->contact());
  if (quorum == nullptr) return {};
  std::vector<std::string> contacts;
  for (int r = 0; r < group.world(); ++r) {
    contacts.push_back(group.store().get(fmt::format("quorum/{}", r), deadline,
                                         fmt::format("waiting for rank {} to join", r)));
    if (contacts.back().empty()) {
      throw CommError(fmt::format(
          "rank {} is to go on without ranks that fail, rank {} is not: gw_comm_options.shrinkable must be "
          "the same on every rank",
          group.rank(), r));
    }
  }
  return contacts;
}

std::unique_ptr<Transport> NcclTransport::regroup(std::chrono::milliseconds timeout,
                                                  std::vector<int>& survivors) {
  if (!setup_.shrinkable || !setup_.group) {
    throw BadInput(
        "the group was not made to go on without some of its ranks: see gw_comm_options.shrinkable");
  }
  if (!setup_.regrouping)
    throw BadInput("the ranks that are left of this group have formed a new one already");
  NcclQuorum& mine = *setup_.regrouping;
  if (!failing()) abort("it is to go on with the ranks that are left");
  try {  // wait until the failure has been handled
    throw_if_failed("going on without some ranks");
  } catch (const CommError&) {
  }
  auto made = form_rest(*mine.quorum, mine.group, mine.address, timeout, survivors,
                        [&](const GroupOptions& rest, const std::vector<int>& ranks) {
                          auto group = std::make_unique<Membership>(rest);
                          auto contacts = exchange_contacts(*group, mine.quorum.get(),
                                                            SteadyClock::now() + rest.join_timeout());
                          std::vector<int> lost;
                          for (int r = 0; r < world(); ++r) {
                            if (!std::binary_search(ranks.begin(), ranks.end(), r)) lost.push_back(r);
                          }
                          NcclSetup next = lost.empty() ? again() : without(std::move(lost));
                          next.group = std::move(group);
                          next.regrouping = NcclQuorum{.quorum = mine.quorum,
                                                       .group = mine.group,
                                                       .address = mine.address,
                                                       .contacts = std::move(contacts)};
                          next.regrouping->group.rank = rest.rank;
                          next.regrouping->group.world = rest.world;
                          return std::make_unique<NcclTransport>(std::move(next));
                        });
  setup_.regrouping.reset();
  return made;
}

}  // namespace gradwire

#endif  // GRADWIRE_HAS_NCCL
