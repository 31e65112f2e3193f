#include "collectives/transport/regroup.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "runtime/util/error.h"

namespace gradwire {

using std::chrono::milliseconds;

std::unique_ptr<Transport> form_rest(Quorum& quorum, const GroupOptions& before, const std::string& address,
                                     milliseconds timeout, std::vector<int>& survivors,
                                     const FormRest& form) {
  constexpr milliseconds kFormAgain{5000};
  constexpr int kJoiner = -1;  // not a rank of the old group
  // Failed attempts to form a group are repeated until this time.
  const auto deadline = SteadyClock::now() + timeout + Quorum::kPatience;
  std::vector<int> left(static_cast<size_t>(before.world));
  std::iota(left.begin(), left.end(), 0);
  while (true) {
    const Quorum::NextGroup found = quorum.regroup(timeout);
    std::vector<int> ranks;
    for (const int r : found.ranks) ranks.push_back(left[static_cast<size_t>(r)]);
    left = std::move(ranks);
    if (!found.joined.empty()) {  // that group has also failed
      left.resize(left.size() + found.joined.size(), kJoiner);
      continue;
    }
    GroupOptions rest = before;
    rest.rendezvous = "what is left of the group";
    rest.callbacks =
        RendezvousCallbacks{.address = address,
                            .publish = [&](const std::string& location) { quorum.publish(found, location); },
                            .read = [&] { return found.location; },
                            .invited = quorum.followers(),
                            .given_up = [&] { return quorum.given_up(); }};
    rest.rank = static_cast<int>(std::find(left.begin(), left.end(), before.rank) - left.begin());
    rest.world = static_cast<int>(left.size());
    rest.joining = std::min(before.join_timeout(), kFormAgain);
    try {
      auto made = form(rest, left);
      survivors = std::move(left);
      return made;
    } catch (const BadInput&) {
      throw;
    } catch (const std::exception&) {  // a rank died meanwhile, or a resource was refused
      if (SteadyClock::now() >= deadline) throw;
    }
  }
}

}  // namespace gradwire
