// Chooses a collective's schedule: the spec's schedule or, for schedule=auto, the fastest schedule according
// to a model of this group's link costs, with a penalty for rounding error.
//
// Predicted time: rounds x latency + bytes / rate, for the pattern in which the schedule loads the links
//   (link_costs.h). `bytes` are the bytes of the busiest rank in each round, in the wire format of the link.
//   Slices add rounds and fill rounds in which few ranks are busy. Kernels are not modelled.
// Error: if the wire is lossy, each lossy step beyond the fewest available counts as 10 % more time.
// Choice: the first of two_shot, hierarchical, ring, tree, nccl within 20 % of the best, so that measurement
//   noise seldom changes it. Equal costs give equal choices, so ranks decide without communication.
// The time of NCCL's allreduce is predicted from measurements. NCCL's allreduce is a candidate only if
// measured, and only for whole FP32 allreduces.
//
// Slices are long enough to amortize the latency of an exchange, but not longer, because the first and the
// last slice of a buffer do not overlap with other work. If links were measured, an exchange is sized to take
// four latencies; otherwise the limit is LinkCosts::slice_bytes. Measured on 4 hosts with 1 Gb/s links, BF16
// in buckets of 10 MB: a step takes 374 ms with slices of 2 MiB, 367 ms with 700 kB, 356 ms with 350 kB,
// 360 ms with 150 kB.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/plan/link_costs.h"
#include "collectives/schedule/schedule.h"
#include "collectives/spec/spec.h"
#include "kernels/wire/format.h"

namespace gradwire {

class SchedulePlanner {
 public:
  // Prepares the candidates. `costs` are used only for schedule=auto and kAutomaticSlices. Throws BadInput if
  // the requested schedule does not support this world.
  // `root`: of a broadcast.
  SchedulePlanner(const CompressionSpec& spec, Collective collective, int world, int ranks_per_node,
                  const LinkCosts& costs, int64_t slice_bytes, int root = 0);

  struct Choice {
    Schedule schedule;
    std::string reason;       // "requested", or the predictions
    double predicted_us = 0;  // from costs(), which may be assumed, not measured
    int64_t slice_bytes = 0;  // for Program::Options
  };
  // Returns the choice for `count` floats in this wire format, cut evenly or into these shards. Fast enough
  // to be called for every program. Throws BadInput if the requested schedule does not support the shards.
  Choice choose(int64_t count, Wire wire, const Shards& shards = {}) const;

  const LinkCosts& costs() const { return costs_; }

 private:
  // A schedule's load on links between nodes and inside a node: [intra_node].
  struct Loads {
    int rounds[2] = {};
    // Sum over rounds of the largest amount that any rank sends or receives, as a fraction of the buffer.
    double serial[2] = {};
    // The largest amount that any rank sends or receives in total, as a fraction of the buffer.
    double busiest[2] = {};
    int messages = 1;  // the largest number of messages that a rank sends in a round
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
  // Returns the schedule's loads. `parts`: each chunk's fraction of the buffer, (chunks).
  static Loads loads(const Schedule& schedule, const std::vector<double>& parts);
  const LinkCosts::Pattern& link(const Candidate& candidate, bool intra_node) const;
  double predicted_us(const Option& option, int64_t count, Wire wire, const Shards& shards) const;
  Option consider(const Candidate& candidate, int64_t count, Wire wire, const Shards& shards) const;

  const bool fp32_intra_node_;  // only links between nodes use the wire format
  const int world_;
  const LinkCosts costs_;
  const int64_t slice_bytes_;
  std::vector<Candidate> candidates_;  // in order of preference; one candidate if the spec names the schedule
  std::string reason_;                 // the reason for the choice if there is only one candidate
};

}  // namespace gradwire
