// An event-driven simulation of a schedule on the links of a cluster.
//
// The rules of schedule.h hold: a rank starts a round when its previous round is done, and a message starts
// when both ends are in its round. A message then takes the latency of its path, and after that moves at the
// smallest share of any link on the path. The messages on a link share its bandwidth equally.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "collectives/schedule/schedule.h"
#include "trainer/measure/recommend.h"
#include "trainer/plan/plan.h"

namespace gradwire {

// The links of a cluster between the ranks of a run, and the path from one rank to another.
//
// A cluster looks the same to every group of symmetric_ranks() consecutive ranks, and so do its links. So
// only the links of the first group exist here, and each stands for the same link of all groups. Groups do
// not matter to a schedule that treats ranks differently, such as a tree.

class Fabric {
 public:
  // A level of the cluster: 0 inside nodes, 1 network cards, 2 and above the links upwards of switches.
  struct Path {
    static constexpr int kMaxLinks = 16;
    std::array<int, kMaxLinks> links{};
    int size = 0;
    int levels = 1;  // number of levels that the path enters, counted from the level below
    bool inside = false;
    double latency_us = 0;
    void add(int link) { links[size++] = link; }
  };

  // `symmetric`: whether the schedules for these links are the same for every group of symmetric_ranks()
  // ranks. If not, the links of all ranks exist. Throws BadInput if the ranks do not fill nodes and switches.
  Fabric(const Cluster& cluster, int ranks, bool symmetric);

  int ranks() const { return ranks_; }
  // The number of ranks of a node.
  int per_node() const { return per_node_; }
  // The number of ranks whose links exist.
  int period() const { return period_; }
  int links() const { return static_cast<int>(bytes_per_us_.size()); }
  double bytes_per_us(int link) const { return bytes_per_us_[link]; }
  // Returns the path of a message from rank `from`, below period(), to any other rank.
  Path path(int from, int to) const;
  // Returns the names of the levels that this number of ranks uses: "node", "nic", "switch 1", ...
  const std::vector<std::string>& levels() const { return levels_; }

 private:
  // Adds both directions of a link that connects a group of ranks upwards.
  struct Both {
    int out = 0, in = 0;
    int group = 0;  // ranks of a group; 0: there are no such links
  };
  Both add_both(int group, double gb_per_s);
  void cross(Path& path, const Both& links, int from, int to) const;

  const Cluster cluster_;
  const int ranks_, per_node_, period_;
  std::vector<double> bytes_per_us_;
  Both gpus_, roots_, nics_;
  std::vector<Both> switches_;
  std::vector<std::string> levels_;
};

// The transfers of a schedule, in the form that the simulator needs: who sends how many chunks to whom in
// each round. The transfers come from the builders of the schedules that run
// (collectives/schedule/schedule.h).

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

// Returns the time until the last rank has finished, in microseconds, for a buffer of `bytes` bytes on the
// wire, or of `intra_node_bytes` on links that a hierarchical schedule marks as inside a node. Very many
// equal rounds are extrapolated: once every rank waits for the slowest link, each round takes the same time.
// `every_round`: simulates every round.
double simulate_us(const FlowRounds& rounds, const Fabric& fabric, double bytes, double intra_node_bytes,
                   bool every_round = false);

// Returns the fraction of the buffer that each of the simulated ranks sends on each level,
// [level of Fabric::levels()][rank]. A message counts on every level that it enters.
std::vector<std::vector<double>> sent_by_level(const FlowRounds& rounds, const Fabric& fabric);

// The time of an allreduce on a cluster, by simulation of a schedule, or by NCCL's estimate.

class SimulatedSchedule {
 public:
  // `kind`: a schedule that supports these ranks, or ScheduleKind::nccl. `cluster` must outlive the object.
  SimulatedSchedule(ScheduleKind kind, const Cluster& cluster, int ranks);
  // Returns whether this many ranks in these nodes can run the schedule.
  static bool supports(ScheduleKind kind, const Cluster& cluster, int ranks);

  ScheduleKind kind() const { return kind_; }
  const Fabric& fabric() const { return fabric_; }
  // The schedule without its rounds. For NCCL, a ring, as in nccl_allreduce() of schedule.h.
  const Schedule& outline() const { return flows_.at(1).outline; }

  // Returns the cost of an allreduce of `count` floats. Schedules are simulated at powers of two, in slices
  // as in a program; times between two powers are interpolated. `fp32_inside`: messages inside nodes of a
  // hierarchical schedule are FP32.
  AllreduceCost cost(int64_t count, Wire wire, bool fp32_inside);
  // Returns the bytes that the busiest rank sends on each level of the fabric for the same allreduce.
  std::vector<double> level_bytes(int64_t count, Wire wire, bool fp32_inside) const;

 private:
  // Returns the time for 2^exponent bytes, of which messages inside nodes have `inside` times as many.
  double knot_us(int exponent, double inside);
  const FlowRounds& flows(int slices);
  bool is_fp32_inside(bool wanted) const { return wanted && kind_ == ScheduleKind::hierarchical; }

  const Cluster& cluster_;
  const ScheduleKind kind_;
  const Fabric fabric_;
  std::map<int, FlowRounds> flows_;  // by slices
  std::vector<double> busiest_;      // [level], fraction of the buffer that the busiest rank sends
  double busiest_of_all_ = 0;        // the same on all levels together
  std::map<std::pair<int, double>, double> knots_;
};

}  // namespace gradwire
