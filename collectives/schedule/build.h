// What the schedule builders share. Internal to collectives/schedule.
#pragma once

#include "collectives/schedule/schedule.h"

namespace gradwire::detail {

// An allreduce of `rounds` empty rounds for each rank; none at all when the world is 1. owner[c] is who owns
// chunk c. Throws BadInput for a world below 1. Every rank is a node of its own until the builder says
// otherwise.
Schedule empty_schedule(ScheduleKind kind, int world, std::vector<int32_t> owner, int rounds);
// As many chunks as ranks, chunk c owned by rank c.
std::vector<int32_t> one_chunk_each(int world);

// Adds both ends of a transfer of chunk `chunk` to round `round`: a send at `from`, `receive` at `to`.
void add_transfer(Schedule& schedule, int round, int from, int to, int chunk, Step::Kind receive,
                  bool intra_node = false);

}  // namespace gradwire::detail
