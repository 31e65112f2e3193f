// Checks that all ranks agree, where a disagreement would otherwise surface late and without its cause.
#pragma once

#include <string>
#include <vector>

#include "collectives/transport/transport.h"

namespace gradwire {

// Collective; `what` is the call it belongs to. Returns if all ranks make the same statements in the same
// order. Otherwise fails the group and throws CommError, which quotes two ranks on the first that differs:
//   ranks disagree: gw_reducer_create has "tensor 1: 'a' (8)" on rank 0, "tensor 1: 'b' (8)" on rank 1
// Sends 16 bytes to each peer if they agree.
void agree_on(Transport& transport, const Stream& stream, const std::vector<std::string>& statements,
              const std::string& what);

}  // namespace gradwire
