// Predicts training steps on a cluster for each compression spec and schedule: `gradwire plan`. Pure
// functions.
//
// The step model is that of `gradwire doctor` (trainer/measure/recommend.h). Compute comes from the GPU's
// training speed, kernels from its memory bandwidth or from a measurement, and allreduces from a simulation.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "trainer/config/config.h"
#include "trainer/measure/recommend.h"

namespace gradwire {

// A description of a cluster, read from a JSON file. docs/plan.md lists the keys.
//
// Every link has a bandwidth in GB/s (1e9 bytes) in each direction, and a latency in microseconds, which
// includes the software at both ends.

struct Cluster {
  enum class Generation : uint8_t { volta, ampere, hopper, blackwell };
  struct Link {
    double gb_per_s = 0, latency_us = 0;
  };
  // Switches of one level. A switch connects `nodes` nodes; its links upwards carry the bandwidth of all
  // nodes below, divided by `oversubscription`.
  struct Level {
    int nodes = 0;
    double oversubscription = 1;
  };

  std::string name, source;
  int gpus_per_node = 8;
  double tflops = 0;           // speed at which a GPU trains
  double memory_gb_per_s = 0;  // bandwidth that kernels reach, read and written
  Generation generation = Generation::hopper;
  bool nvlink = false;    // false: PCIe
  Link gpu;               // a GPU to the other GPUs of its node
  int gpus_per_root = 0;  // PCIe: GPUs that share a link to the rest of the node; 0: none do
  double root_gb_per_s = 0;
  int nics = 0;  // network cards of a node; GPUs share them evenly
  Link nic;
  std::vector<Level> switches;  // from the lowest level up; empty: one switch without a limit
  struct Nccl {
    double launch_us = 0;      // time of an allreduce in addition to NCCL's own estimate
    int channels = 0;          // 0: the generation's usual number
    double nvls_gb_per_s = 0;  // bandwidth of sums inside the switch of a node; 0: no NVLS
    // The only algorithms that NCCL may use, and the only protocols in runs of several nodes. Empty: all.
    std::vector<std::string> algorithms, network_protocols;
  } nccl;
  // Kernel times by spec, in the form of `gradwire doctor --json`. A spec that is missing is estimated from
  // memory_gb_per_s.
  std::map<std::string, double> kernels_ns_per_element;

  // Return the number of consecutive ranks below one switch of the highest level that `ranks` ranks need.
  // The cluster looks the same to every such group.
  int symmetric_ranks(int ranks) const;
};

// Parses a cluster. Throws BadInput, which names `path` and the key: not JSON, an unknown or missing key, or
// a value out of range.
Cluster parse_cluster(const std::string& text, const std::string& path);
Cluster read_cluster(const std::string& path);
// Throws BadInput unless `ranks` ranks fill whole nodes, and whole switches of each level that they need.
void check_ranks(const Cluster& cluster, int ranks);

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
