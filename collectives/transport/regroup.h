// The transports' common part of ElasticGroup::regroup().
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/net/membership.h"
#include "collectives/net/quorum.h"
#include "collectives/transport/transport.h"

namespace gradwire {

// Throws BadInput if a group cannot regroup: because the group is not `shrinkable`, or because the group's
// survivors have already formed a new group, which then has the quorum.
void require_regroupable(bool shrinkable, bool has_quorum);
// Throws CommError if `rank` has a quorum and `other` has none. `contact`: the contact of the other rank's
// quorum; "" if `other` has none.
void require_contact(int rank, int other, const std::string& contact);

// Forms the new group of the old ranks `ranks`, ascending; -1 for new ranks. Throws CommError if a rank dies
// meanwhile.
using FormGroup =
    std::function<std::unique_ptr<Transport>(const GroupOptions& options, const std::vector<int>& ranks)>;

// Implements ElasticGroup::regroup(): repeats the survivors' agreement on their ranks until they have formed
// a group. `failed`: the failed group, to which `quorum` belongs. `address`: this machine's address, where
// the new group's store may listen.
std::unique_ptr<Transport> regroup_survivors(Quorum& quorum, const GroupOptions& failed,
                                             const std::string& address, std::chrono::milliseconds timeout,
                                             std::vector<int>& survivors, const FormGroup& form);

}  // namespace gradwire
