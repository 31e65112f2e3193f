// An allreduce of gradwire-bench collectives: a schedule, a compression spec, a size.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "collectives/reducer/reducer.h"
#include "collectives/spec/spec.h"

namespace gradwire::bench {

struct CollectiveCase {
  CompressionSpec spec;  // includes the schedule, which is never `automatic`
  int64_t size_bytes = 0;
};

// The flags that all ranks share.
struct CollectiveSettings {
  int warmup = 5, iterations = 20, check = 1;
  int average = 3;  // -a of nccl-tests: the time of rank 0, the ranks' mean, the minimum, the maximum
  // -z of nccl-tests. 0: calls follow each other without a wait. After each call, 1: the rank waits for its
  // completion and for the other ranks, 2: for its completion only, 3: for both, without the wait for the
  // other ranks being timed.
  int blocking = 0;
  int unalign = 0;   // elements before the first, which misalign the buffer
  int per_node = 0;  // ranks per node of hierarchical schedules
  uint64_t slice_bytes = kSliceBytes;

  // Returns one time for the ranks' times.
  double average_of(const std::vector<double>& ranks_us) const;
};

struct CollectiveResult {
  double time_us = 0;     // mean time of an iteration, of the rank that settings.average chooses
  double wire_bytes = 0;  // bytes that the busiest rank sends per iteration, measured at the transport
  double fp32_bytes = 0;  // bytes that the same schedule sends in FP32
  double wrong = 0;       // wrong elements, summed over ranks
  double rel_error = 0;   // norm of the difference to the exact mean / norm of the exact mean
  std::vector<std::vector<double>> times_us;  // times_us[rank][iteration]
};

// Returns the microseconds of an allreduce of `count` floats by another library on this rank: the mean of
// `iterations` calls after `warmup` calls. Collective.
using AllreduceBaseline = std::function<double(int64_t count, int warmup, int iterations)>;

// Return the baseline among the ranks of `comm`, or null in a build without the library. Collective.
// `rendezvous`: of the ranks; its route selects this machine's address.
AllreduceBaseline make_gloo_baseline(Communicator& comm, const Stream& stream, const std::string& rendezvous,
                                     double timeout_s);
// Requires that the device of `comm` is a GPU.
AllreduceBaseline make_nccl_baseline(Communicator& comm, const Stream& stream);

// A rank of the benchmark. All ranks must make the same calls.
class CollectiveRank {
 public:
  CollectiveRank(Communicator& comm, const CollectiveSettings& settings);

  // Runs the case. Collective. Returns the same result on every rank.
  CollectiveResult run_case(const CollectiveCase& c);

  const Stream stream;

 private:
  class Bucket;
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
  std::vector<double> run_iterations(Bucket& bucket, Measured& mine);
  const std::vector<double>& exact_means(Values kind, int64_t count);

  Communicator& comm_;
  CollectiveSettings settings_;
  Buffer data_;
  std::vector<double> means_;  // exact means of the values of kind means_kind_
  Values means_kind_ = Values::integers;
};

}  // namespace gradwire::bench
