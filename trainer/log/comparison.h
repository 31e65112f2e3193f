// The result of `gradwire compare`: its table and its JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trainer/log/summary.h"

namespace gradwire {

struct SeedRun {
  uint64_t seed = 0;
  RunSummary summary;
  std::string log;  // file name; "" for no log
};

// A compression with a bucket size, and at least one run: one run per seed.
struct ComparedRun {
  std::string compression;
  std::vector<SeedRun> seeds = {};
  int ranks = 1;
  std::string device = {};  // "host" or "cuda"
  std::string link = {};    // EmulatedLink::to_string(); "" if links are not emulated
  double bucket_mb = 0;
};

// Return the JSON array that `gradwire compare --json` writes (docs/formats.md), and a table with a line per
// compression and bucket size. `target`: the percentage of --target-accuracy, for the time to this accuracy.
std::string compare_document(const std::vector<ComparedRun>& runs, std::optional<double> target = {});
std::string compare_table(const std::vector<ComparedRun>& runs, std::optional<double> target = {});

}  // namespace gradwire
