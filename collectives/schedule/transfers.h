// The transfers of a schedule one at a time. The schedule of thousands of ranks does not fit in memory: a
// ring of 4,096 ranks has 67 million steps. A sink keeps the part that its user needs. The builders of
// schedule.h emit the same transfers into a sink that keeps all of them.
#pragma once

#include "collectives/schedule/schedule.h"

namespace gradwire {

class TransferSink {
 public:
  virtual ~TransferSink() = default;
  // Called once, before add(). `outline`: the schedule without its rounds.
  virtual void begin(const Schedule& outline, int rounds) = 0;
  // Adds both ends of a transfer of chunk `chunk`: a send at `from`, `receive` at `to`. Transfers of one
  // round are added in the order in which both ranks do their steps.
  virtual void add(int round, int from, int to, int chunk, Step::Kind receive, bool intra_node) = 0;
};

// Passes the transfers of make_schedule(kind, world, topology) to `sink`. Throws BadInput for a kind that
// does not support this world.
void emit_schedule(ScheduleKind kind, int world, Topology topology, TransferSink& sink);

}  // namespace gradwire
