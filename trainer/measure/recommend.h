// Predicts the time of a training step with each compression from the measured speed of a device and of the
// links between ranks, to decide whether to compress. Pure functions.
//
//   step = compute + exposed + optimizer
//
// Backward, two thirds of compute, finishes gradients in order, in time proportional to their elements. A
// full bucket is compressed and reduced after the previous buckets, while backward continues. This takes
// `codec` for its kernels, plus the time of its allreduces: by the planner's cost model
// (collectives/plan/planner.h) from measured links, or by a simulation (trainer/plan) of other links.
// Exposed is the communication time that remains after backward. On the host, kernels and backward share the
// cores: a bucket's kernels delay backward by the kernels' time, and take twice as long while backward runs.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/plan/link_costs.h"
#include "collectives/reducer/reducer.h"

namespace gradwire {

struct StepCosts {
  std::vector<GradientTensor> tensors;  // in the order in which backward finishes the gradients
  int world = 1;
  int ranks_per_node = 0;
  LinkCosts links;
  double compute_ms = 0;  // forward and backward of a rank's batch, without communication
  double optimizer_ms = 0;
  int64_t micro_batches = 1;               // batches per step; only the last one overlaps with communication
  std::map<std::string, double> codec_ns;  // kernel time in ns per gradient element, by spec
  // Relative L2 error of one encode of the gradients, by spec (peaks.h); empty: not measured.
  std::map<std::string, double> errors;
  bool shared_cores = false;  // true if kernels slow down backward
  // The share of a codec's kernel time that lies between its exchanges, by spec: sums.
  std::map<std::string, double> sums = {};
  // The spread of the measurements, for Prediction's interval: standard deviations of single runs, divided by
  // the mean, and repeated measurements of the links. Empty: not known.
  struct Spread {
    double compute = 0;
    std::map<std::string, double> codec = {};
    std::vector<LinkCosts> links = {};
  } spread = {};
};

struct Prediction {
  std::string spec;
  int64_t bucket_mb = 0;
  int buckets = 0;
  std::string schedule = {};  // schedule of the largest bucket's largest allreduce
  double sent_bytes = 0;      // bytes sent by the busiest rank
  double dense_bytes = 0;     // bytes of the gradients in FP32
  double compute_ms = 0;      // until backward ends, with the delay by kernels that share its cores
  double codec_ms = 0, comm_ms = 0, exposed_ms = 0, step_ms = 0;
  double late_ms = 0;  // part of exposed_ms: the expected wait for the slowest rank
  // The time of the kernels outside exchanges and of the exchanges with their sums on the reducer's stream,
  // as a run measures them.
  double kernels_ms = 0, links_ms = 0;
  double error = std::numeric_limits<double>::quiet_NaN();  // StepCosts::errors; NaN: not measured
  // Limits of step_ms that hold with a probability of 90 %; NaN: not computed.
  double low_ms = std::numeric_limits<double>::quiet_NaN(), high_ms = low_ms;
};

struct AllreduceCost {
  double us = 0;
  double sent_bytes = 0;      // bytes sent by the busiest rank
  std::string schedule = {};  // name of the schedule
};
// Returns the cost of an allreduce of `count` floats in a wire format.
using AllreduceModel = std::function<AllreduceCost(int64_t count, Wire wire)>;

// Predicts a step with one spec and bucket size in MiB. costs.links are not used. Throws BadInput for a spec
// that costs.codec_ns lacks.
Prediction predict_step(const StepCosts& costs, const std::string& spec, int64_t bucket_mb,
                        const AllreduceModel& allreduce);
// Does the same with the planner's model of costs.links.
Prediction predict_step(const StepCosts& costs, const std::string& spec, int64_t bucket_mb);
// Sets the limits of a prediction's step. The parts of the spread are independent: each is the change of the
// step when a measurement changes by its deviation, or kModelDeviation of the step for what the model leaves
// out.
constexpr double kModelDeviation = 0.05;
void add_interval(const StepCosts& costs, Prediction& prediction);
// Gives the spec `text`, which is `base` with more dense tensors, the measured kernels of `base`.
void copy_kernel_costs(const std::string& base, const std::string& text, StepCosts& costs);
// Returns the prediction of a bucket size within 2 % of the fastest: the default bucket size of 25 MiB if
// possible. `tried` is not empty.
Prediction best_of(const std::vector<Prediction>& tried);

// Return the candidate specs, most accurate first, and the candidate bucket sizes in MiB. The last bucket
// size holds all gradients.
std::vector<std::string> candidate_specs();
std::vector<int64_t> candidate_bucket_mb(const StepCosts& costs);

// The specs and bucket sizes to choose from, and the rule.
struct Choices {
  std::vector<std::string> specs = candidate_specs();  // the first is FP32
  std::vector<int64_t> bucket_mb = {};                 // empty: candidate_bucket_mb()
  // Larger errors of one encode are excluded. Infinity: errors are not limited and need not be measured.
  double error = std::numeric_limits<double>::infinity();
  // A more accurate spec is preferred if its step takes at most this many times the shortest: a smaller gain
  // does not justify rounding errors.
  double tie = 1.1;
};

struct Recommendation {
  Choices from;
  std::vector<Prediction> best;  // for each spec, most accurate first, with the best bucket size
  Prediction one_bucket;         // FP32 without overlap
  size_t chosen = 0;             // index in `best`
  bool compress() const { return chosen != 0; }
  // FP32 is always allowed, whatever was measured.
  bool allows(const Prediction& p) const {
    return !std::isfinite(from.error) || p.spec == from.specs[0] || p.error <= from.error;
  }
};

// Chooses the most accurate allowed spec whose predicted step is within a tie of the shortest allowed one.
Recommendation recommend(const StepCosts& costs, const Choices& from = {});

// --compression auto: the request for a compression that is chosen from measurements before the first step.

struct AutoCompression {
  double error = 0.1;              // the largest error of one encode of the gradients (peaks.h)
  bool replan = true;              // whether the run may choose again
  std::string plan;                // file of the choice: read if it exists, otherwise written; or empty
  std::vector<std::string> allow;  // candidates besides FP32; empty: candidate_specs()

  // Returns whether a value of --compression is a request, not a spec.
  static bool is_request(std::string_view text);
  // Parses kAutoGrammar. allow= is last, because specs contain commas. Throws BadInput.
  static AutoCompression parse(std::string_view text);
  std::string to_string() const;
  // Returns the choices: FP32 first. `bucket_mb`: the given bucket sizes; empty: all candidates.
  Choices choices(std::vector<int64_t> bucket_mb) const;
  std::vector<CompressionSpec> candidates() const;  // the specs of choices()
  // Returns the candidate of which `spec` is a choice: the same spec, or with more dense tensors; "" if none.
  std::string candidate_of(const std::string& spec) const;

 private:
  void set_option(std::string_view text, std::string_view option);
};

// Which buckets a compressed run may average in FP32 at no cost, because backward hides them.

// Returns a short list of names and patterns ("layer1.*") that match exactly `some` of the names `all`.
std::vector<std::string> name_patterns(const std::vector<std::string>& all,
                                       const std::vector<std::string>& some);

// Returns the choice's spec with the tensors of its first buckets in dense=, as many as leave the predicted
// step as short as without, even if backward takes 40 % of the measured time. Returns "" if there are none.
// Backward hides the first buckets best, and the last bucket not at all.
std::string with_dense_buckets(StepCosts costs, const Prediction& choice);

}  // namespace gradwire
