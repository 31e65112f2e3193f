// NCCL's own estimate of its allreduce, by which NCCL chooses the algorithm and the protocol: the baseline of
// a plan. Restated from the published constants of NCCL 2.30's tuner.
#pragma once

#include <string>

#include "trainer/plan/plan.h"

namespace gradwire {

struct NcclEstimate {
  std::string algorithm;  // "ring", "tree", "nvls" or "nvls_tree"
  std::string protocol;   // "ll", "ll128" or "simple"
  double us = 0;
};

// Returns NCCL's choice for an allreduce of `bytes` bytes: the fastest estimate of the pairs that NCCL would
// consider.
NcclEstimate nccl_allreduce_estimate(const Cluster& cluster, int ranks, double bytes);

}  // namespace gradwire
