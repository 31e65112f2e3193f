// What a group of ranks is good for: its links, how fast each rank trains, what compression costs there, and
// so which compression pays.
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
  LinkCosts links;
  std::optional<LinkMatrix> matrix;  // of worlds up to kMatrixRanks
  Peaks peaks;                       // of rank 0's device
  double rank_tflops = 0;            // of the slowest rank, training, all ranks at once
  VitConfig probe;                   // the model that was trained to see that: fewer layers
  int64_t probe_batch = 0;
  int64_t parameters = 0, batch_size = 0;
  double flops_per_image = 0;
  double optimizer_bytes = 0;  // moved by a step of AdamW
  StepCosts costs;
  Recommendation recommendation;
};
constexpr int kMatrixRanks = 8;

// Collective, and blocks the caller for a few seconds: every rank passes the same config, of which model,
// batch size, precision and devices matter. `sharing`: ranks that are on rank 0's device. Every rank returns
// the same. `patience`: how long to time each thing, against about two seconds in all.
RanksReport examine_ranks(Communicator& comm, const TrainConfig& config, int sharing, double patience = 1);

// For people: the links, then the prediction with its arithmetic.
std::string links_text(const RanksReport& report);
std::string recommendation_text(const RanksReport& report, const VitConfig& model);

}  // namespace gradwire
