// What transports share of Transport::regroup(): the ranks that are left agree on that until they have formed a group.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/rendezvous/membership.h"
#include "collectives/rendezvous/reunion.h"
#include "collectives/transport/transport.h"

namespace gradwire {

// Makes the new group of old ranks `ranks`, ascending, -1 for new ones. Throws CommError if one of them dies meanwhile.
using FormRest =
    std::function<std::unique_ptr<Transport>(const GroupOptions& rest, const std::vector<int>& ranks)>;

// `before`: the failed group, to which `reunion` belongs. `address`: of this machine, where the new group's store may
// listen. As Transport::regroup().
std::unique_ptr<Transport> form_rest(Reunion& reunion, const GroupOptions& before, const std::string& address,
                                     std::chrono::milliseconds timeout, std::vector<int>& survivors,
                                     const FormRest& form);

}  // namespace gradwire
