// An allreduce of gradwire-bench collectives: a schedule, a compression spec, a size.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "collectives/reducer/reducer.h"
#include "collectives/schedule/schedule.h"
#include "collectives/spec/spec.h"

namespace gradwire::bench {

struct CollectiveCase {
  CompressionSpec spec;  // includes the schedule, which is never `automatic`
  int64_t size_bytes = 0;
};

// Which ranks' time counts: -a of nccl-tests.
enum class Average { rank0, mean, min, max };
// When a rank waits: -z of nccl-tests. Calls follow each other without a wait; or after each call the rank
// waits for its completion and for the other ranks, for its completion only, or for both without the wait for
// the other ranks being timed.
enum class Blocking { none, timed_barrier, wait, untimed_barrier };

struct CollectiveSettings {
  int warmup = 5, iterations = 20;
  bool check = true;
  Average average = Average::max;
  Blocking blocking = Blocking::none;
  int64_t unalign = 0;  // elements before the first, which misalign the buffer
  int per_node = 0;     // ranks per node of hierarchical schedules
  int64_t slice_bytes = ReducerOptions{}.slice_bytes;
};

struct CollectiveResult {
  double time_us = 0;     // mean time of an iteration, of the rank that settings.average chooses
  double wire_bytes = 0;  // bytes that the busiest rank sends per iteration, measured at the transport
  double fp32_bytes = 0;  // bytes that the same schedule sends in FP32
  double wrong = 0;       // wrong elements, summed over ranks
  double rel_error = 0;   // norm of the difference to the exact mean / norm of the exact mean
  std::vector<std::vector<double>> times_us;  // times_us[rank][iteration]
};

// Returns one time for the ranks' times.
double average_of(const std::vector<double>& ranks_us, Average average);

// A rank of the benchmark. All ranks must make the same calls.
class CollectiveRank {
 public:
  CollectiveRank(Communicator& comm, const CollectiveSettings& settings);

  const Stream& stream() const { return stream_; }
  // Runs the case. Collective. Returns the same result on every rank.
  CollectiveResult run(const CollectiveCase& c);

 private:
  class Program;
  // This rank's part of a result.
  struct Measured {
    double time_us, wire_bytes, fp32_bytes, wrong, error2, norm2;
    uint64_t hash;  // hash of the first step's result
  };
  // The ranks' data: small integers, whose sums are exact in every wire format, or normally distributed
  // values.
  enum class Values { integers, normal };
  float value(Values kind, int rank, int64_t i) const;
  void fill(Values kind, int64_t count);
  void check_results(const CollectiveCase& c, Measured& mine);
  float* data() const { return data_.as<float>() + settings_.unalign; }
  // Runs the timed iterations. Returns the time of each, and sets their mean in `mine`.
  std::vector<double> run_iterations(Program& program, Measured& mine);
  const std::vector<double>& exact_means(Values kind, int64_t count);

  Communicator& comm_;
  CollectiveSettings settings_;
  Stream stream_;
  Buffer data_;
  std::vector<double> means_;  // exact means of the values of kind means_kind_
  Values means_kind_ = Values::integers;
};

}  // namespace gradwire::bench
