// An allreduce of gradwire-bench collectives: a schedule, a compression spec, a size.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/cases/test_rows.h"
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

// Measures the error and bias of one encode and decode in a wire format.

struct RowError {
  double error = 0;  // squared error of an encode and decode / squared norm of the row
  // bias: norm of the mean error over many draws / norm of the row. by_chance: the expected bias of an
  // unbiased format; 0 for round to nearest, whose draws are all equal.
  double bias = 0, by_chance = 0;
  bool random = false;  // true if the draws differ
  double bytes_per_element = 0;
};

struct RowSetError {
  std::vector<RowError> rows;
  double mean = 0, standard_error = 0;  // statistics of `error` over the rows; NaN for a single row
  double total = 0;                     // sum of squared errors / sum of squared norms
  double bias = 0, by_chance = 0;       // bias of all rows combined
  bool random = false;
  double bytes_per_element = 0;
  size_t worst = 0;  // the row with the largest error
};

// Measures the error of each row of `set`, on the host. `draws`, at least 2: number of encodes of each row,
// for formats that round stochastically.
RowSetError round_trip_error(const CompressionSpec& spec, const RowSet& set, int draws, uint64_t seed);

// The gradients of well-known models: names and shapes, in the order in which backward finishes them.

// Returns the gradients of a ViT of the trainer, of resnet18 or of resnet50. Throws BadInput, which lists the
// known names, for any other name.
std::vector<GradientTensor> gradients_of(const std::string& model);

int64_t elements_of(const std::vector<GradientTensor>& tensors);

}  // namespace gradwire::bench
