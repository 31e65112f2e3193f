// Measures a group of ranks: its links, the training speed of each rank, and the cost of compression.
// Predicts from these measurements which compression reduces the step time.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "trainer/config/config.h"
#include "trainer/log/records.h"
#include "trainer/measure/peaks.h"
#include "trainer/measure/recommend.h"

namespace gradwire {

// Latency and bandwidth between a pair of ranks, measured one pair at a time.
struct PairSpeed {
  double latency_us = 0;  // of 64 bytes in both directions at the same time
  double gb_per_s = 0;    // bandwidth in each direction, with traffic in both directions
};
// Measures all pairs. Collective; blocks for about 50 ms per pair on any link. `costs` determines the message
// sizes and must be the same on every rank. Every rank returns the same values, [a * world + b].
std::vector<PairSpeed> measure_pairs(Communicator& comm, const Stream& stream, const LinkCosts& costs);

struct RanksReport {
  int world = 1;
  std::string transport;  // "local", "tcp", "nccl"
  EmulatedLink link;
  LinkCosts links;
  std::vector<PairSpeed> pairs;  // [a * world + b]; empty for worlds above kPairRanks
  Peaks peaks;                   // peaks of rank 0's device
  double rank_tflops = 0;        // the slowest rank's speed while all ranks train
  VitConfig probe;               // the model that was trained to measure rank_tflops: fewer layers
  int64_t probe_batch = 0;
  int64_t parameters = 0, batch_size = 0;
  double flops_per_image = 0;
  double optimizer_bytes = 0;  // bytes that an AdamW step reads and writes; 0: the step was measured
  StepCosts costs;
  Recommendation recommendation;
};
constexpr int kPairRanks = 8;

// What examine_ranks() measures beyond the links. The defaults are those of `gradwire doctor`.
struct Examination {
  double patience = 1;  // scales the time for each measurement; 1: about two seconds for all measurements
  Choices choices = {};
  // The tensors of one bucket, on which kernels are measured; empty: those of one encoder layer.
  std::vector<GradientTensor> bucket = {};
  // Times forward and backward of a whole batch, for about `budget_ms` by all ranks at once, and an
  // optimizer's step in ms; 0: not measured. Empty: two layers are measured, and scaled by their FLOPs; the
  // optimizer's time is derived from the speed of copies.
  std::function<std::pair<Timing, double>(const Stream& stream, double budget_ms)> compute = {};
  // Returns the error of one encode of the gradients with a spec. Called on rank 0, after compute; empty:
  // not measured.
  std::function<double(const std::string& spec)> error = {};
};

// Measures the ranks. Collective; blocks for a few seconds. Every rank passes the same config. Only the
// config's model, batch size, micro-batches, precision, devices and link are used. Every rank returns the
// same report.
RanksReport examine_ranks(Communicator& comm, const TrainConfig& config, const Examination& what = {});

// Runs `examine` on every rank: with `comm` or, if `comm` is null, on a thread for each rank of this process.
// Returns rank 0's result, or this process's. Throws the first error of any rank.
RanksReport examine_group(const TrainConfig& config, Communicator* comm,
                          const std::function<RanksReport(Communicator&)>& examine);

// Return the report as text: the links, and the prediction with its arithmetic and the choice.
std::string links_text(const RanksReport& report);
std::string recommendation_text(const RanksReport& report, const VitConfig& model);

// The report of examine_ranks() as JSON; docs/formats.md describes the fields.

// Return the links between the ranks, and the predictions with the choice.
Json ranks_json(const RanksReport& report);
Json prediction_json(const RanksReport& report, const VitConfig& model);

}  // namespace gradwire
