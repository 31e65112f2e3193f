// The contents of a checkpoint, and how they get from a rank's device to its files and back.
//
//   model.safetensors            the weights, with torchvision's names and shapes
//   state-R-of-N.safetensors     the state of rank R's codecs: residuals, factors, ... State that is the same
//                                on all ranks, and the optimizer's moments, are in rank 0's file only. Every
//                                file has the run's position
//
// Weights and moments are one file's tensors, however the run divides them: rank 0 creates the files, and each rank
// writes its part of every tensor to its place there, or reads it.
//
// No random generator state is needed: every random number is a function of the seed, the step and the epoch.
// docs/checkpoints.md is the user's guide.
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

// Optimizer state: a value for each element of a rank's parts, on the device.
struct FlatState {
  std::string name;  // "m"
  Parts<float> values;
};

// What a rank puts into a checkpoint, or takes out of it. No work may be in flight.
struct RankState {
  Communicator& comm;
  Stream stream;
  Reducer& reducer;
  const std::vector<VitParameter>& parameters;
  const ParameterLayout& layout;
  Parts<float> weights;
  std::vector<FlatState> moments;
  // The elements of the layout that this rank has weights and moments of.
  std::vector<ElementRange> parts;
  bool divided = false;  // among the ranks; else every rank has them all, and rank 0 writes them
  // Memory, in ParameterLayout, for residuals that this run has no place for. Asked for once, if there are any; also in
  // host memory.
  std::function<float*()> left_over = {};
};

struct SavedCheckpoint {
  std::string path;
  uint64_t bytes = 0;  // that this rank wrote
};

// Collective.
SavedCheckpoint save_checkpoint(const RankState& rank, const TrainConfig& config, const Position& position);

// Checks every file, and loads this rank's parts. Rank r of this run takes the sum of the residuals of the checkpoint's ranks r,
// r + world, ..., so the sum over all ranks is kept. A residual that this run has no place for (a world of 1,
// another compression) is left in rank.left_over(): the result is then true, and the first step must add its gradients
// to it.
bool restore_checkpoint(const RankState& rank, const TrainConfig& config, const CheckpointHead& head);

// Loads weights only, into `out`, which has layout.elements floats; gaps become 0. Strict: throws BadInput,
// which names missing and unexpected tensors and those of another shape or type.
void load_weights(const std::string& path, const std::vector<VitParameter>& parameters,
                  const ParameterLayout& layout, bool checksum_required, std::span<float> out);
// The same checks, without reading the weights.
void check_weights(const std::string& path, const VitConfig& model);

}  // namespace gradwire
