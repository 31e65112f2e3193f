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

struct CollectiveSettings {
  int warmup = 5, iterations = 20;
  bool check = true;
  int per_node = 0;  // ranks per node of hierarchical schedules
  int64_t slice_bytes = ReducerOptions{}.slice_bytes;
};

struct CollectiveResult {
  double time_us = 0;     // mean time of an iteration on the slowest rank
  double wire_bytes = 0;  // bytes that the busiest rank sends per iteration, measured at the transport
  double fp32_bytes = 0;  // bytes that the same schedule sends in FP32
  double wrong = 0;       // wrong elements, summed over ranks
  double rel_error = 0;   // norm of the difference to the exact mean / norm of the exact mean
};

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
  const std::vector<double>& exact_means(Values kind, int64_t count);

  Communicator& comm_;
  CollectiveSettings settings_;
  Stream stream_;
  Buffer data_;
  std::vector<double> means_;  // exact means of the values of kind means_kind_
  Values means_kind_ = Values::integers;
};

}  // namespace gradwire::bench
