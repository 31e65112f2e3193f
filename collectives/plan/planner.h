// Which schedule a collective runs: the one that the spec asks for, or for schedule=auto the one that a model
// with this group's link costs predicts to be done first, error weighed in.
//
// Predicted time: rounds x latency + bytes / rate, in the pattern in which the schedule loads the links
// (link_costs.h); bytes are those of the busiest rank in each round, in the wire format of the link; slices
// add rounds and fill up those in which few ranks have something to do. Kernels are not in the model.
// Error: where the wire rounds, a schedule counts as 10 % slower for each lossy step more than the fewest on
// offer. Choice: the first of two_shot, hierarchical, ring, tree that is within 20 % of the best, so that
// noise in a measurement seldom changes it. Equal costs give equal choices: every rank decides for itself.
//
// Slices: long enough that the latency of an exchange hardly shows, and no longer, because the first and the
// last slice of a buffer overlap with nothing. Where links were measured an exchange takes four latencies.
// Seen on 4 hosts with links of 1 Gb/s, BF16 in buckets of 10 MB: steps of 374 ms with slices of 2 MiB, 367
// of 700 kB, 356 of 350 kB (which is this rule's), 360 of 150 kB.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/plan/link_costs.h"
#include "collectives/schedule/schedule.h"
#include "kernels/wire/format.h"

namespace gradwire {

// What is asked of a planner: the part of a compression spec that schedules depend on.
struct ScheduleRequest {
  ScheduleKind kind = ScheduleKind::automatic;
  bool fp32_intra_node = false;  // the wire format is left to the links between nodes
  Collective collective = Collective::allreduce;
};

class SchedulePlanner {
 public:
  // `costs` matter for schedule=auto and kAutomaticSlices alone. Throws BadInput where the schedule asked for
  // cannot serve this world.
  SchedulePlanner(const ScheduleRequest& request, int world, int ranks_per_node, const LinkCosts& costs,
                  int64_t slice_bytes);

  struct Choice {
    Schedule schedule;
    std::string reason;       // "asked for", or what was predicted for each
    double predicted_us = 0;  // from costs(), which are assumed until somebody measures them
    int64_t slice_bytes = 0;  // for Program::Options
  };
  // For `count` floats in this wire format. Cheap enough to be called for every program.
  Choice choose(int64_t count, Wire wire) const;

  const LinkCosts& costs() const { return costs_; }

 private:
  // Of a schedule: rounds, and the busiest rank's load in them, inside and between nodes.
  struct Load {
    int rounds = 0;
    double serial = 0;   // sum over rounds of the most that a rank sends or receives, in buffers
    double busiest = 0;  // the most that a rank sends or receives in all
  };
  struct Candidate {
    Schedule schedule;
    Load load[2];      // [intra_node]
    int messages = 1;  // the most that a rank sends in a round
  };
  const LinkCosts::Pattern& link(const Candidate& candidate, bool intra_node) const;
  int64_t slice_bytes(const Candidate& candidate) const;
  double predicted_us(const Candidate& candidate, int64_t count, Wire wire) const;
  int lossy_steps(const Candidate& candidate, Wire wire) const;

  const ScheduleRequest request_;
  const int world_;
  const LinkCosts costs_;
  const int64_t slice_bytes_;
  std::vector<Candidate> candidates_;  // in order of preference; one when asked for
  std::string reason_;                 // when there is nothing to choose
};

}  // namespace gradwire
