// The time of an allreduce on a cluster, by simulation of a schedule, or by NCCL's estimate.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "trainer/measure/recommend.h"
#include "trainer/plan/fabric.h"
#include "trainer/plan/flow_rounds.h"

namespace gradwire {

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
