// Regroups after a failure. The survivors, which are processes with GPUs, find each other through their
// quorum, join a new store, and derive a new NCCL communicator from the old communicator, which the failure
// has revoked.
#ifdef GRADWIRE_HAS_NCCL

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "collectives/transport/nccl/nccl_transport.h"
#include "collectives/transport/transport.h"
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
