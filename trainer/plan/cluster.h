// A description of a cluster, read from a JSON file. docs/plan.md lists the keys.
//
// Every link has a bandwidth in GB/s (1e9 bytes) in each direction, and a latency in microseconds, which
// includes the software at both ends.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace gradwire {

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

}  // namespace gradwire
