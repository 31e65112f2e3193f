// Helpers shared by the schedule builders. Internal to collectives/schedule.
#pragma once

#include "collectives/schedule/schedule.h"

namespace gradwire::detail {

// Returns an allreduce with `rounds` empty rounds per rank, or without rounds in a world of 1. owner[c] is
// the rank that owns chunk c. Every rank is a separate node unless the builder sets nodes and per_node.
// Throws BadInput for a world below 1.
Schedule empty_schedule(ScheduleKind kind, int world, std::vector<int32_t> owner, int rounds);
// Returns the topology with the unknown field derived from the world. Throws BadInput if the topology does
// not fit the world.
Topology complete(Topology topology, int world);
// Returns the owners of `world` chunks: rank c owns chunk c.
std::vector<int32_t> one_chunk_each(int world);

// Adds both ends of a transfer of chunk `chunk` to round `round`: a send at `from`, `receive` at `to`.
void add_transfer(Schedule& schedule, int round, int from, int to, int chunk, Step::Kind receive,
                  bool intra_node = false);

}  // namespace gradwire::detail
