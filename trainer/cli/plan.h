// `gradwire plan` predicts training steps on a cluster that one does not have.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gradwire {

struct PlanOptions {
  std::string cluster;
  std::optional<int> ranks;
  std::string model = "vit_b_32";
  int64_t batch_size = 32;
  std::vector<std::string> compression;
  std::vector<double> bucket_mb;
  std::string json;
};

// Prints the plan and, with options.json, writes it to a file. Throws BadInput.
void plan(const PlanOptions& options);

}  // namespace gradwire
