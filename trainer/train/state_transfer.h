// State transfer to ranks that join a running group: the state that is equal on all ranks (weights, moments,
// and codec state except residuals).
#pragma once

#include <vector>

#include "trainer/checkpoint/checkpoint.h"

namespace gradwire {

// Sends the state to the ranks `joiners`. Collective over the group, whose ranks hold the whole state on the
// host. Every other rank sends each joiner a part of every tensor, so that the links transfer the parts in
// parallel. No work may be in flight.
void transfer_state(const RankState& rank, const std::vector<int>& joiners);

}  // namespace gradwire
