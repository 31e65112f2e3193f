// Do all ranks say the same? Asked once where a disagreement would otherwise show late, without saying in what.
#pragma once

#include <string>
#include <vector>

#include "collectives/transport/transport.h"

namespace gradwire {

// Collective; `what` is the call it belongs to. Returns when all ranks make the same statements in the same order.
// Otherwise fails the group and throws CommError, which quotes two ranks on the first statement that differs:
//   ranks disagree: gw_reducer_create has "tensor 1: 'a' (3 x 4)" on rank 0, "tensor 1: 'b' (3 x 4)" on rank 1
// 16 bytes to each peer when they agree.
void agree_on(Transport& transport, const Stream& stream, const std::vector<std::string>& statements,
              const std::string& what);

}  // namespace gradwire
