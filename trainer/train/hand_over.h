// How a rank that joins a running group gets what is the same on all ranks: weights, moments, and the codecs' state,
// but for residuals.
#pragma once

#include <vector>

#include "trainer/checkpoint/checkpoint.h"

namespace gradwire {

// Collective over the group, whose ranks hold their state whole, on the host. Each rank but the newcomers sends every
// newcomer its part of everything, so all their links carry it at the same time. No work may be in flight.
void hand_over(const RankState& rank, const std::vector<int>& newcomers);

}  // namespace gradwire
