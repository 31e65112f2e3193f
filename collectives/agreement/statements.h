// Checks that all ranks agree, so that a disagreement is reported at once and with its cause.
#pragma once

#include <string>
#include <vector>

#include "collectives/transport/transport.h"

namespace gradwire {

// Checks that all ranks make the same statements in the same order. Otherwise fails the group and throws
// CommError, which quotes two ranks on the first statement that differs:
//   ranks disagree: gw_reducer_create has "tensor 1: 'a' (8)" on rank 0, "tensor 1: 'b' (8)" on rank 1
// `what`: the call that makes the statements. Sends 16 bytes to each peer if the ranks agree. Collective.
void agree_on(Transport& transport, const Stream& stream, const std::vector<std::string>& statements,
              const std::string& what);

}  // namespace gradwire
