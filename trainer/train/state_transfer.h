// State transfer to ranks that join a running group: the state that is equal on all ranks (weights, moments,
// and codec state except residuals).
#pragma once

#include <vector>

#include "trainer/checkpoint/checkpoint.h"

namespace gradwire {

// Sends the state to the ranks `joiners`. Collective over the group, whose ranks hold the whole state on
// the host. Each other rank sends every joiner a part of everything, so that all links carry it in parallel.
// No work may be in flight.
void transfer_state(const RankState& rank, const std::vector<int>& joiners);

}  // namespace gradwire
