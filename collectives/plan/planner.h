// Chooses a collective's schedule: the spec's or, for schedule=auto, the fastest according to a model of this
// group's link costs, with a penalty for rounding error.
//
// Predicted time: rounds x latency + bytes / rate, for the pattern in which the schedule loads the links
//   (link_costs.h). Counted are the bytes of the busiest rank in each round, in the wire format of the link.
//   Slices add rounds and fill rounds in which few ranks are busy. Kernels are not modelled.
// Error: if the wire is lossy, each lossy step beyond the fewest available counts as 10 % more time.
// Choice: the first of two_shot, hierarchical, ring, tree, nccl within 20 % of the best, so that measurement
//   noise seldom changes it. Equal costs give equal choices, so ranks decide without communication.
// NCCL's own allreduce is predicted from its measured time. It is a candidate only if measured, and only for
// whole FP32 allreduces.
//
// Peer access (transport=lsa): one kernel, in two shots, or in one shot where the saved barrier takes longer
// than the added bytes. In a hierarchical schedule, rounds inside nodes then cost as much as loads from other
// ranks' memory. transport=auto uses peer access unless messages are predicted to be faster.
//
// Slices: long enough to amortize the latency of an exchange, but not longer, because the first and the last
// slice of a buffer do not overlap with other work. If links were measured, an exchange is sized to take four
// latencies. Measured on 4 hosts with 1 Gb/s links, BF16 in buckets of 10 MB: steps of 374 ms with slices of
// 2 MiB, 367 with 700 kB, 356 with 350 kB (this rule's choice), 360 with 150 kB.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "collectives/plan/link_costs.h"
#include "collectives/schedule/schedule.h"
#include "kernels/wire/format.h"

namespace gradwire {

// The fields of a compression spec that determine schedules.
struct ScheduleRequest {
  ScheduleKind kind = ScheduleKind::automatic;
  bool fp32_intra_node = false;  // only links between nodes use the wire format
  Collective collective = Collective::allreduce;
  int root = 0;  // root of a broadcast
  // When peer access replaces messages in an allreduce. peer_access_obstacle: why it cannot
  // (Communicator::peer_access_obstacle()); "" if it can.
  PeerAccessMode peer_access = PeerAccessMode::off;
  std::string peer_access_obstacle = {};
};

class SchedulePlanner {
 public:
  // `costs` are used only for schedule=auto and kAutomaticSlices. Throws BadInput if the requested schedule
  // does not support this world.
  SchedulePlanner(const ScheduleRequest& request, int world, int ranks_per_node, const LinkCosts& costs,
                  int64_t slice_bytes);

  struct Choice {
    Schedule schedule;
    std::string reason;       // "requested", or the predictions
    double predicted_us = 0;  // from costs(), which may be assumed
    int64_t slice_bytes = 0;  // for Program::Options
  };
  // Returns the choice for `count` floats in this wire format, cut evenly or into these shards. Cheap: call
  // it for every program. Throws BadInput if the requested schedule does not support the shards.
  Choice choose(int64_t count, Wire wire, const Shards& shards = {}) const;

  const LinkCosts& costs() const { return costs_; }

 private:
  // A schedule's load on one class of links, inside or between nodes.
  struct Load {
    int rounds = 0;
    // Sum over rounds of the most that any rank sends or receives, in buffers.
    double serial = 0;
    // The most that any rank sends or receives in total.
    double busiest = 0;
  };
  struct Loads {
    Load of[2];        // [intra_node]
    int messages = 1;  // the most that a rank sends in a round
  };
  struct Candidate {
    Schedule schedule;
    Loads even;  // loads with an even cut
  };
  struct Option {
    const Candidate* candidate;
    Loads loads;
    int64_t slice_bytes;
    double us, score;
    int lossy_steps;
  };
  // `parts`: each chunk's fraction of the buffer, (chunks).
  static Loads loads(const Schedule& schedule, const std::vector<double>& parts);
  const LinkCosts::Pattern& link(const Candidate& candidate, bool intra_node) const;
  int64_t slice_bytes(const Candidate& candidate, const Loads& loads) const;
  double predicted_us(const Option& option, int64_t count, Wire wire, const Shards& shards) const;
  Option consider(const Candidate& candidate, int64_t count, Wire wire, const Shards& shards) const;
  Choice choose_kernel(int64_t count, Wire wire) const;
  Choice choose_inside_nodes(int64_t count, Wire wire) const;
  Choice choose_messages(int64_t count, Wire wire, const Shards& shards) const;
  int lossy_steps(const Candidate& candidate, Wire wire) const;
  // Returns whether the candidate supports this wire and these shards.
  bool can_serve(const Candidate& candidate, Wire wire, const Shards& shards) const;

  const ScheduleRequest request_;
  const int world_;
  const LinkCosts costs_;
  const int64_t slice_bytes_;
  std::vector<Candidate> candidates_;  // in order of preference; one if the spec names it
  std::optional<Candidate> inside_;    // the hierarchical schedule with peer access inside nodes
  std::string reason_;                 // if there is only one candidate
};

}  // namespace gradwire
