// All-gather of a few numbers, for agreement between ranks at set-up.
#pragma once

#include <string>
#include <vector>

#include "collectives/transport/transport.h"

namespace gradwire {

// Gathers every rank's numbers; result[r] are rank r's. All ranks pass equally many. The exchange runs on
// `stream`, after earlier work on it. Collective; blocks.
std::vector<std::vector<double>> all_gather(Transport& transport, const Stream& stream,
                                            const std::vector<double>& mine, const std::string& what);

}  // namespace gradwire
