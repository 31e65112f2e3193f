// NCCL's own estimate of its allreduce, by which NCCL chooses the algorithm and the protocol: the baseline of
// a plan. Restated from the published constants of NCCL 2.30's tuner.
#pragma once

#include <string>
#include <vector>

#include "trainer/plan/plan.h"

namespace gradwire {

struct NcclEstimate {
  std::string algorithm;  // "ring", "tree", "nvls" or "nvls_tree"
  std::string protocol;   // "ll", "ll128" or "simple"
  double us = 0;
};

// Returns the estimates of all pairs that NCCL would consider for an allreduce of `bytes` bytes.
std::vector<NcclEstimate> nccl_estimates(const Cluster& cluster, int ranks, double bytes);
// Returns the fastest of these estimates: NCCL's choice.
NcclEstimate nccl_allreduce_estimate(const Cluster& cluster, int ranks, double bytes);

}  // namespace gradwire
