// The flags of gradwire-bench collectives.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "bench/harness/result_files.h"
#include "collectives/reducer/reducer.h"

namespace gradwire::bench {

struct CollectivesOptions {
  uint64_t min_bytes = 1 << 20, max_bytes = 16 << 20;
  int factor = 4, iterations = 20, warmup = 5, check = 1;
  int average = 3, per_iteration = 0, skip = 0, blocking = 0, unalign = 0;
  std::vector<std::string> schedules, compression, transports;
  int ranks = 4, per_node = 0;
  std::string device = "host", rendezvous;
  ResultPaths results;
  double timeout_s = 60;
  uint64_t slice_bytes = kSliceBytes;
  bool no_baseline = false, child = false;
};

// Returns the names of all schedules that --schedule accepts, except nccl.
std::vector<std::string> schedule_names();

// Adds the flags of nccl-tests, with their meaning there.
void add_nccl_tests_flags(CLI::App& command, CollectivesOptions& o);
// Adds all other flags.
void add_own_flags(CLI::App& command, CollectivesOptions& o);

}  // namespace gradwire::bench
