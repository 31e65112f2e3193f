// What the schedule builders share. Internal to collectives/schedule.
#pragma once

#include "collectives/schedule/schedule.h"

namespace gradwire::detail {

// Schedule of `rounds` empty rounds for each rank; none at all when the world is 1. Throws BadInput for a
// world below
// 1. Every rank is a node of its own until the builder says otherwise.
Schedule empty_schedule(ScheduleKind kind, int world, int chunks, int rounds);

// Adds both ends of a transfer of chunk `chunk` to round `round`: a send at `from`, `receive` at `to`.
void add_transfer(Schedule& schedule, int round, int from, int to, int chunk, Step::Kind receive,
                  bool fast = false);

}  // namespace gradwire::detail
