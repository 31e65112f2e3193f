// The contents of a checkpoint, and the copies between a rank's device and its files.
//
//   model.safetensors            the weights, with torchvision's names and shapes
//   state-R-of-N.safetensors     the state of rank R's codecs: residuals, factors, ... State that is the same
//                                on all ranks, and the optimizer's moments, are in rank 0's file only. Every
//                                file has the run's position
//
// Each weight and moment is a tensor of one file, whether or not the run divides the state among its ranks.
// Rank 0 creates the files, and each rank writes or reads its part of every tensor.
//
// Random generators have no state to store: every random number is a function of the seed, the step and the
// epoch. User's guide: docs/checkpoints.md.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "collectives/reducer/reducer.h"
#include "runtime/device/device.h"
#include "trainer/checkpoint/head.h"
#include "trainer/config/config.h"
#include "trainer/model/parameters.h"

namespace gradwire {

// Optimizer state on the device, with one value for each element of a rank's parts.
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
  bool divided = false;  // weights are divided; otherwise every rank has all weights and rank 0 writes them
};

struct SavedCheckpoint {
  std::string path;
  uint64_t bytes = 0;  // bytes written by this rank
};

// Saves a checkpoint. Collective; blocks until the checkpoint's files are on disk.
SavedCheckpoint save_checkpoint(const RankState& rank, const TrainConfig& config, const Position& position);

// Checks every file of the checkpoint, and loads this rank's parts. Rank r of this run takes the sum of the
// residuals of the checkpoint's ranks r, r + world, ..., which preserves the sum over all ranks. Residuals
// that no codec of this run takes (a world of 1, another compression) go to the reducer's gradients; the
// function then returns true, and the first step must add its gradients to these residuals.
bool restore_checkpoint(const RankState& rank, const TrainConfig& config, const CheckpointHead& head);

// Loads only the weights into `out`, which has layout.elements floats. Sets gaps to 0. Throws BadInput, which
// names the missing and unexpected tensors, and the tensors of another shape or type.
void load_weights(const std::string& path, const std::vector<VitParameter>& parameters,
                  const ParameterLayout& layout, bool checksum_required, std::span<float> out);
// Makes the checks of load_weights() without reading the weights.
void check_weights(const std::string& path, const VitConfig& model);

// The gradients of one step on one rank, before communication. `gradwire train --dump-gradients` writes them
// to a safetensors file with torchvision's names and shapes, for `gradwire-bench formats --gradients`.

// Returns DIR/gradients-step-N.safetensors.
std::string gradients_path(const std::string& directory, int64_t step);

class GradientDump {
 public:
  // Prepares to dump the gradients of config.gradients_step. All referenced arguments must outlive the
  // object.
  GradientDump(const TrainConfig& config, const std::vector<VitParameter>& parameters,
               const ParameterLayout& layout, Device device);

  // Copies gradient i in stream order. Call after enqueuing the computation of the gradient, and before the
  // reducer may change the gradient. `gradient` is on the stream's device.
  void take(const Stream& stream, int i, const float* gradient);
  // Returns the gradients, laid out as `layout`. Requires that the stream has passed every take().
  std::vector<float> values() const;
  // Writes the file; requires that the stream has passed every take(). The file is complete or absent.
  // Reports a failure without ending the run.
  void write() const;

 private:
  void write_file(const std::string& path) const;
  const TrainConfig& config_;
  const std::vector<VitParameter>& parameters_;
  const ParameterLayout& layout_;
  Buffer copies_;  // pinned; (layout.elements)
};

}  // namespace gradwire
