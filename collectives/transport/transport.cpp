#include "collectives/transport/transport.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "runtime/util/error.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

constexpr const char* kRemedy = "start one process per rank (torchrun, srun or mpirun)";

}  // namespace

std::unique_ptr<Transport> Transport::split(const std::vector<int>&) {
  throw BadInput("the {} transport cannot be split", name_);
}

std::string Transport::allreduce_obstacle() const {
  if (has_allreduce()) return "";
  return fmt::format(
      "over the {} transport there is no NCCL; start a process for each GPU (torchrun, srun or mpirun), or "
      "use schedule=auto",
      name_);
}

void Transport::allreduce(const Stream&, const float*, float*, int64_t, bool, uint64_t, const std::string&) {
  throw BadInput(allreduce_obstacle());
}

void Transport::send_message(const std::string&) {
  Transport::take_message(0);
}

std::string Transport::take_message(int) {
  throw Error("the {} transport carries no messages; {}", name_, kRemedy);
}

std::unique_ptr<Transport> Transport::regroup(milliseconds, std::vector<int>&) {
  throw BadInput("the {} transport cannot continue when ranks die; {}", name_, kRemedy);
}

void Transport::open_admission(int, std::function<std::string(const std::string&)>) {
  Transport::grow();
}

std::string Transport::invitation() const {
  throw BadInput("no new ranks can join over the {} transport; use processes on the host (transport tcp)",
                 name_);
}

std::unique_ptr<Transport> Transport::grow() {
  throw BadInput(Transport::invitation());
}

void require_regroupable(bool shrinkable, bool has_quorum) {
  require(shrinkable,
          "the group was not created to continue without some of its ranks; set gw_comm_options.shrinkable");
  require(has_quorum, "the survivors of this group have formed a new one already; use the new one");
}

void require_contact(int rank, int other, const std::string& contact) {
  require<CommError>(
      !contact.empty(),
      "rank {} continues without ranks that fail, rank {} does not: gw_comm_options.shrinkable "
      "must be the same on every rank",
      rank, other);
}

std::unique_ptr<Transport> regroup_survivors(
    Quorum& quorum, const GroupOptions& failed, const std::string& address, milliseconds timeout,
    std::vector<int>& survivors,
    const std::function<std::unique_ptr<Transport>(const GroupOptions&, const std::vector<int>&)>& form) {
  constexpr milliseconds kFormAgain{5000};
  constexpr int kJoiner = -1;  // marks a rank that is not a rank of the old group
  // Repeat failed attempts to form a group until this time.
  const auto deadline = SteadyClock::now() + timeout + Quorum::kPatience;
  std::vector<int> left(static_cast<size_t>(failed.world));
  std::iota(left.begin(), left.end(), 0);
  while (true) {
    const Quorum::NextGroup found = quorum.regroup(timeout);
    std::vector<int> ranks;
    for (const int r : found.ranks) ranks.push_back(left[static_cast<size_t>(r)]);
    left = std::move(ranks);
    if (!found.joined.empty()) {  // the grown group has also failed
      left.resize(left.size() + found.joined.size(), kJoiner);
      continue;
    }
    GroupOptions next = failed;
    next.rendezvous = "the survivors of the group";
    next.callbacks =
        RendezvousCallbacks{.address = address,
                            .publish = [&](const std::string& location) { quorum.publish(found, location); },
                            .read = [&] { return found.location; },
                            .invited = quorum.followers(),
                            .given_up = [&] { return quorum.given_up(); }};
    next.rank = static_cast<int>(std::find(left.begin(), left.end(), failed.rank) - left.begin());
    next.world = static_cast<int>(left.size());
    next.joining = std::min(failed.join_timeout(), kFormAgain);
    try {
      auto made = form(next, left);
      survivors = std::move(left);
      return made;
    } catch (const BadInput&) {
      throw;
    } catch (const std::exception&) {  // a rank died meanwhile, or the system refused a resource
      if (SteadyClock::now() >= deadline) throw;
    }
  }
}

}  // namespace gradwire
