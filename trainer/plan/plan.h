// Predicts training steps on a cluster for each compression spec and schedule: `gradwire plan`. Pure
// functions.
//
// The step model is that of `gradwire doctor` (trainer/measure/recommend.h). Compute comes from the GPU's
// training speed, kernels from its memory bandwidth or from a measurement, and allreduces from a simulation.
#pragma once

#include <string>
#include <vector>

#include "trainer/config/config.h"
#include "trainer/measure/recommend.h"
#include "trainer/plan/cluster.h"

namespace gradwire {

struct PlanRequest {
  Cluster cluster;
  int ranks = 1;
  VitConfig model;
  int64_t batch_size = 1;
  std::vector<std::string> specs;  // empty: candidate_specs()
  std::vector<int64_t> bucket_mb;  // sizes in MiB; empty: candidate_bucket_mb()
};

// A spec with a schedule.
struct PlanRow {
  Prediction best;                  // with the best bucket size
  std::vector<Prediction> tried;    // with every bucket size
  std::vector<double> level_bytes;  // bytes that the busiest rank sends on each level, in the best prediction
  // The expected relative error of the average over ranks with independent gradients, in the L2 norm. 0:
  // exact; negative: unknown.
  double error = 0;
  double memory_bytes = 0;  // weights, gradients, AdamW's moments, residual and messages of a rank
};

struct Plan {
  StepCosts costs;
  std::vector<std::string> levels;  // names of the levels of links
  int64_t parameters = 0;
  std::vector<PlanRow> rows;  // the first row is the baseline: FP32 by NCCL
};

// Throws BadInput for a spec or schedule that does not fit the ranks, and ranks that do not fill the cluster.
Plan make_plan(const PlanRequest& request);

// Returns the plan as text and as JSON. The JSON also has NCCL's estimate for allreduces of 4 KiB to 16 GiB.
std::string plan_text(const PlanRequest& request, const Plan& plan);
std::string plan_json(const PlanRequest& request, const Plan& plan);

}  // namespace gradwire
