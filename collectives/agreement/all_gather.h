// A few numbers of every rank, on every rank: for agreements between ranks at set-up.
#pragma once

#include <string>
#include <vector>

#include "collectives/transport/transport.h"

namespace gradwire {

// Collective, and blocks the caller. Every rank passes as many numbers; result[r] are rank r's. `stream`:
// where the exchange runs, behind what was enqueued there before.
std::vector<std::vector<double>> all_gather(Transport& transport, const Stream& stream,
                                            const std::vector<double>& mine, const std::string& what);

}  // namespace gradwire
