// The transports' common part of Transport::regroup(): survivors agree on their ranks until they have formed
// a group.
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

// Forms the new group of the old ranks `ranks`, ascending; -1 for new ones. Throws CommError if one of them
// dies meanwhile.
using FormRest =
    std::function<std::unique_ptr<Transport>(const GroupOptions& rest, const std::vector<int>& ranks)>;

// Implements Transport::regroup(). `before`: the failed group, to which `quorum` belongs. `address`: of this
// machine, where the new group's store may listen.
std::unique_ptr<Transport> form_rest(Quorum& quorum, const GroupOptions& before, const std::string& address,
                                     std::chrono::milliseconds timeout, std::vector<int>& survivors,
                                     const FormRest& form);

}  // namespace gradwire
