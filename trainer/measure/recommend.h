// To compress or not: what a training step would take with each compression, predicted from what a device and
// the links between ranks were measured to do. A function of its arguments.
//
//   step = compute + exposed + optimizer
//
// Backward, two thirds of compute, finishes gradients in their order, in proportion to their elements. A
// bucket that is full is compressed and reduced behind the buckets before it, while backward goes on: `codec`
// for its kernels, and what the planner's cost model (collectives/plan/planner.h) predicts for its allreduces.
// Exposed is what is left when backward is done. On the host kernels and backward share the cores: what a
// bucket's kernels take comes on top of backward, and beside it they take twice as long.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "collectives/plan/link_costs.h"
#include "collectives/reducer/reducer.h"

namespace gradwire {

struct StepCosts {
  std::vector<GradientTensor> tensors;  // in the order in which backward finishes them
  int world = 1;
  int ranks_per_node = 0;
  LinkCosts links;
  double compute_ms = 0;  // forward and backward of a rank's batch, alone
  double optimizer_ms = 0;
  std::map<std::string, double> codec_ns;  // kernels of a spec, per element of the gradients
  bool shared_cores = false;               // kernels take their time from backward
};

struct Prediction {
  std::string spec;
  int64_t bucket_mb = 0;
  int buckets = 0;
  std::string schedule = {};  // of the largest bucket's largest allreduce
  double sent_bytes = 0;      // by the busiest rank
  double dense_bytes = 0;     // the gradients in FP32
  double codec_ms = 0, comm_ms = 0, exposed_ms = 0, step_ms = 0;
};

// One spec with one bucket size, in MiB. Throws BadInput for a spec that costs.codec_ns does not have.
Prediction predict_step(const StepCosts& costs, const std::string& spec, int64_t bucket_mb);

// Specs that are tried, gentlest first, and bucket sizes, of which 25 is the default; the last one holds
// every gradient.
std::vector<std::string> candidate_specs();
std::vector<int64_t> candidate_bucket_mb(const StepCosts& costs);

struct Recommendation {
  std::vector<Prediction> best;  // of each candidate spec, with the bucket size that suits it
  Prediction one_bucket;         // FP32 without overlap
  size_t chosen = 0;             // of `best`
  bool compress() const { return chosen != 0; }
};

// The gentlest spec whose step is predicted within 10 % of the fastest: compression that gains less is not
// worth its rounding.
Recommendation recommend(const StepCosts& costs);

}  // namespace gradwire
