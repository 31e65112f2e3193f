// The transfers of a schedule, in the form that the simulator needs: who sends how many chunks to whom in
// each round. The transfers come from the builders of the schedules that run
// (collectives/schedule/schedule.h).
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/schedule/schedule.h"
#include "trainer/plan/fabric.h"

namespace gradwire {

// One message: all chunks that a rank sends to another rank in a round.
struct Flow {
  int32_t from = 0, to = 0, chunks = 0;
  bool intra_node = false;  // Step::intra_node
  bool operator==(const Flow&) const = default;
};

struct FlowRounds {
  // Consecutive rounds with the same flows.
  struct Run {
    std::vector<Flow> flows;
    int rounds = 1;
  };
  Schedule outline;  // without rounds
  int chunks = 1;    // parts of equal size into which the buffer is cut, slices included
  std::vector<Run> runs;
};

// Returns the flows of make_schedule() for the fabric's ranks and nodes, cut into `slices` as by pipelined().
// Lists only flows from the fabric's first period() ranks: the others do the same, shifted by a period.
FlowRounds flow_rounds(ScheduleKind kind, const Fabric& fabric, int slices = 1);
// Returns the flows of any schedule, from all ranks.
FlowRounds flow_rounds(const Schedule& schedule);
// Returns whether rank r + p does the same as rank r, for every p that cuts the world into groups of nodes.
bool is_symmetric(ScheduleKind kind);

}  // namespace gradwire
