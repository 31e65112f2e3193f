// The contents of a checkpoint, and how they get from a rank's device to its files and back.
//
//   model.safetensors            the weights, with torchvision's names and shapes
//   state-R-of-N.safetensors     the state of rank R's codecs: residuals, factors, ... State that is the same
//                                on all ranks, and the optimizer's moments, are in rank 0's file only. Every
//                                file has the run's position
//
// No random generator state is needed: every random number is a function of the seed, the step and the epoch.
// docs/checkpoints.md is the user's guide.
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

struct Position {
  int64_t step = 0;    // optimizer steps done
  int64_t epoch = 0;   // from 0
  int64_t images = 0;  // images of this epoch already used, over all ranks
};

struct CheckpointHead {
  std::string path;  // of the checkpoint's folder
  Position position;
  int world = 1;
  std::string compression;
  // What schedule=auto based its choice on, if measured: a new measurement could lead to another schedule.
  std::optional<LinkCosts> links;
  std::string config;  // the run's, as JSON text
};

// Reads headers only. Throws BadInput, which names the file, when something is missing or inconsistent.
CheckpointHead read_head(const std::string& checkpoint);
// Throws BadInput when the run cannot continue from there (another model or optimizer, or fewer steps than
// the checkpoint has done). Returns a note for each setting that changes how the run continues.
std::vector<std::string> compare_with_head(const TrainConfig& config, const CheckpointHead& head);

// Optimizer state: a flat buffer in ParameterLayout, on the device.
struct FlatState {
  std::string name;  // "m"
  float* data = nullptr;
};

// The parts of a rank's checkpoint. No work may be in flight.
struct RankState {
  Communicator& comm;
  Stream stream;
  Reducer& reducer;
  const std::vector<VitParameter>& parameters;
  const ParameterLayout& layout;
  float* weights;
  std::vector<FlatState> moments;
  float* left_over =
      nullptr;  // restore_checkpoint() leaves residuals there that this run has no place for; in ParameterLayout
};

struct SavedCheckpoint {
  std::string path;
  uint64_t bytes = 0;  // of this rank's files
};

// Collective.
SavedCheckpoint save_checkpoint(const RankState& rank, const TrainConfig& config, const Position& position);

// Checks and loads every file. Rank r of this run takes the sum of the residuals of the checkpoint's ranks r,
// r + world, ..., so the sum over all ranks is kept. A residual that this run has no place for (a world of 1,
// another compression) is left in rank.left_over: the result is then true, and the first step must add its gradients
// to it.
bool restore_checkpoint(const RankState& rank, const TrainConfig& config, const CheckpointHead& head);

// Loads weights only, into `out`, which has layout.elements floats; gaps become 0. Strict: throws BadInput,
// which names missing and unexpected tensors and those of another shape or type.
void load_weights(const std::string& path, const std::vector<VitParameter>& parameters,
                  const ParameterLayout& layout, bool checksum_required, std::span<float> out);
// The same checks, without reading the weights.
void check_weights(const std::string& path, const VitConfig& model);

}  // namespace gradwire
