// What a checkpoint holds, and its way between a rank's device and its files.
//
//   model.safetensors            the weights, with torchvision's names and shapes
//   state-R-of-N.safetensors     what rank R's codecs keep: residuals, factors, ... What is the same on all
//                                ranks, and the optimizer's moments, are in rank 0's alone. Every one says
//                                where the run stands
//
// There is no generator among them: every random number is a function of the seed, the step and the epoch.
// docs/checkpoints.md is the reader's side of this file.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "collectives/plan/link_costs.h"
#include "collectives/reducer/reducer.h"
#include "trainer/config/config.h"
#include "trainer/model/parameters.h"

namespace gradwire {

// Where a run stands.
struct Position {
  int64_t step = 0;    // optimizer steps done
  int64_t epoch = 0;   // passes over the training images begun, from 0
  int64_t images = 0;  // of that pass, over all ranks, already used
};

struct CheckpointHead {
  std::string path;  // of the checkpoint's folder
  Position position;
  int world = 1;
  std::string compression;
  // What schedule=auto went by, where it was measured: measured again it might choose another schedule.
  std::optional<LinkCosts> links;
  std::string config;  // the run's, as JSON text
};

// Reads a few headers. Throws BadInput that names the file when something is missing or contradicts itself.
CheckpointHead read_head(const std::string& checkpoint);
// Throws BadInput when the run cannot go on from there (another model, another optimizer, more steps than it
// has). Returns a line for each setting that makes it go on differently.
std::vector<std::string> compare_with_head(const TrainConfig& config, const CheckpointHead& head);

// A flat buffer in ParameterLayout that outlives a step, on the device.
struct FlatState {
  std::string name;  // "m"
  float* data = nullptr;
};

// What a rank's checkpoint is made of. All work in flight is done.
struct RankState {
  Communicator& comm;
  Stream stream;
  Reducer& reducer;
  const std::vector<VitParameter>& parameters;
  const ParameterLayout& layout;
  float* weights;
  std::vector<FlatState> moments;
};

struct SavedCheckpoint {
  std::string path;
  uint64_t bytes = 0;  // of this rank's files
};

// Collective.
SavedCheckpoint save_checkpoint(const RankState& rank, const TrainConfig& config, const Position& position);

// Loads everything, after checking all of it. Rank r of this run takes the residuals of the checkpoint's
// ranks r, r + world, ..., added up, so that their sum stays. What this run has no residual for (a world of
// 1, other compression) is left in reducer.gradients(): then the result is true, and the first step's
// gradients must be added to it.
bool restore_checkpoint(const RankState& rank, const TrainConfig& config, const CheckpointHead& head);

// Weights alone, into `out`, which has layout.elements floats; gaps are 0. Strict: throws BadInput that names
// missing, unexpected and differently shaped tensors.
void load_weights(const std::string& path, const std::vector<VitParameter>& parameters,
                  const ParameterLayout& layout, bool checksum_required, std::span<float> out);
// The same check without reading the weights.
void check_weights(const std::string& path, const VitConfig& model);

}  // namespace gradwire
