// The contents of a checkpoint, and the copies between a rank's device and its files.
//
//   model.safetensors            the weights, with torchvision's names and shapes
//   state-R-of-N.safetensors     the state of rank R's codecs: residuals, factors, ... State that is the same
//                                on all ranks, and the optimizer's moments, are in rank 0's file only. Every
//                                file has the run's position
//
// However the run divides weights and moments, each of them is a tensor of one file. Rank 0 creates the
// files, and each rank writes or reads its part of every tensor.
//
// Random generators have no state to store: every random number is a function of the seed, the step and the
// epoch. User's guide: docs/checkpoints.md.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "collectives/reducer/reducer.h"
#include "trainer/checkpoint/head.h"
#include "trainer/config/config.h"
#include "trainer/model/parameters.h"

namespace gradwire {

// Optimizer state: one value for each element of a rank's parts, on the device.
struct FlatState {
  std::string name;  // "m"
  Parts<float> values;
};

// The state of a rank that a checkpoint saves or restores. No work may be in flight.
struct RankState {
  Communicator& comm;
  Stream stream;
  Reducer& reducer;
  const std::vector<VitParameter>& parameters;
  const ParameterLayout& layout;
  Parts<float> weights;
  std::vector<FlatState> moments;
  // The elements of the layout whose weights and moments this rank holds.
  std::vector<ElementRange> parts;
  bool divided = false;  // among the ranks; otherwise every rank holds all, and rank 0 writes them
  // Returns memory, in ParameterLayout, for residuals that no codec of this run takes; also in host memory.
  // Called once, and only if there are such residuals.
  std::function<float*()> left_over = {};
};

struct SavedCheckpoint {
  std::string path;
  uint64_t bytes = 0;  // written by this rank
};

// Saves a checkpoint. Collective; blocks until its files are on disk.
SavedCheckpoint save_checkpoint(const RankState& rank, const TrainConfig& config, const Position& position);

// Checks every file, and loads this rank's parts. Rank r of this run takes the sum of the residuals of the
// checkpoint's ranks r, r + world, ..., which preserves the sum over all ranks. Residuals that no codec of
// this run takes (a world of 1, another compression) go to rank.left_over(); the function then returns true,
// and the first step must add its gradients to them.
bool restore_checkpoint(const RankState& rank, const TrainConfig& config, const CheckpointHead& head);

// Loads weights only, into `out`, which has layout.elements floats; gaps become 0. Throws BadInput, which
// names missing and unexpected tensors and tensors of another shape or type.
void load_weights(const std::string& path, const std::vector<VitParameter>& parameters,
                  const ParameterLayout& layout, bool checksum_required, std::span<float> out);
// Makes the same checks without reading the weights.
void check_weights(const std::string& path, const VitConfig& model);

}  // namespace gradwire
