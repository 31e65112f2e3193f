// Measures a group of ranks: its links, the training speed of each rank, and the cost of compression.
// Predicts from these measurements which compression reduces the step time.
#pragma once

#include <optional>
#include <string>

#include "collectives/communicator/communicator.h"
#include "trainer/config/config.h"
#include "trainer/measure/link_matrix.h"
#include "trainer/measure/peaks.h"
#include "trainer/measure/recommend.h"

namespace gradwire {

struct RanksReport {
  int world = 1;
  std::string transport;  // "local", "tcp", "nccl"
  EmulatedLink link;
  LinkCosts links;
  std::optional<LinkMatrix> matrix;  // empty for worlds above kMatrixRanks
  Peaks peaks;                       // peaks of rank 0's device
  double rank_tflops = 0;            // the slowest rank's speed while all ranks train
  VitConfig probe;                   // the model that was trained to measure rank_tflops: fewer layers
  int64_t probe_batch = 0;
  int64_t parameters = 0, batch_size = 0;
  double flops_per_image = 0;
  double optimizer_bytes = 0;  // bytes that an AdamW step reads and writes
  StepCosts costs;
  Recommendation recommendation;
};
constexpr int kMatrixRanks = 8;

// Measures the ranks. Collective; blocks for a few seconds. Every rank passes the same config. Only the
// config's model, batch size, precision and devices are used. `sharing`: ranks on rank 0's device. `patience`
// scales the time for each measurement; 1 means about two seconds for all measurements. Every rank returns
// the same report.
RanksReport examine_ranks(Communicator& comm, const TrainConfig& config, int sharing, double patience = 1);

// Return the report as text: the links, and the prediction with its arithmetic.
std::string links_text(const RanksReport& report);
std::string recommendation_text(const RanksReport& report, const VitConfig& model);

}  // namespace gradwire
