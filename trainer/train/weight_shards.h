// --shard optimizer: each rank updates a part of the weights, and the ranks gather the parts.
//
// A rank's part is its shard of each bucket (Reducer::owned()). With an exact format the shards are updated
// in place and all-gathered after the step. With any other format, each rank also keeps its shards in
// FP32 (master weights), which the optimizer updates. All ranks, including the owner, compute with the
// transmitted values. So all ranks hold the same bits, and the rounding errors of steps do not accumulate.
#pragma once

#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "collectives/codec/codec.h"
#include "collectives/communicator/communicator.h"
#include "collectives/program/program.h"
#include "collectives/reducer/reducer.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/config/config.h"
#include "trainer/model/parameters.h"
#include "trainer/model/vit.h"
#include "trainer/model/vit_passes.h"
#include "trainer/train/optimizer_state.h"

namespace gradwire {

class WeightShards {
 public:
  // Allocates the shards and binds the gathers. Collective. `model` runs on `stream`. All arguments must
  // outlive the object.
  WeightShards(const TrainConfig& config, Communicator& comm, const Stream& stream, const Reducer& reducer,
               Vit& model);
  WeightShards(const WeightShards&) = delete;

  // Returns this rank's shards in FP32: the weights that the optimizer updates and a checkpoint stores.
  Parts<float> weights() const;
  // Sends this rank's shards to every rank's model, in the transmitted format. Call after weights() changes.
  // Collective.
  void share_weights();
  // Copies the shards from `flat`, reducer.elements() floats on host or device, and shares them. Collective.
  void take_weights(const float* flat);
  // Returns the number of FP32 master weights of a rank: its part of the weights; 0 if updated in place.
  static int64_t master_elements(const TrainConfig& config, const Reducer& reducer);
  // The bytes that this rank sends for weights in a step: in the chosen format, and in FP32.
  struct Sent {
    uint64_t wire = 0, dense = 0;
  };
  Sent sent() const;

 private:
  using Programs = std::vector<std::unique_ptr<Program>>;
  // Builds a program per bucket that gathers the bucket's weights in format `wire`.
  Programs programs(const TrainConfig& config, const Wire& wire) const;

  Communicator& comm_;
  const Stream stream_;
  const Reducer& reducer_;
  Vit& model_;
  const std::vector<ElementRange> owned_;
  Buffer masters_;        // FP32 shards; empty if updated in place
  Programs gathers_;      // one program per bucket
  const Programs dense_;  // the same programs in FP32, to count their bytes; never run
  Buffer workspace_;      // sized for the largest gather
};

// The device memory of a run, planned before it starts.

struct RunMemory {
  int64_t model = 0;          // weights, activations of one batch, and loaded images
  int64_t gradients = 0;      // one FP32 value per parameter, including gaps between tensors
  int64_t optimizer = 0;      // moments and, with --gather-weights, a rank's FP32 weights
  ReducerMemory compression;  // the reducer's memory in addition to the gradients
  int64_t kept = 0;           // --elastic: bytes of the snapshots of the last two steps
  int64_t evaluation = 0;     // activations of an evaluation batch, and loaded images

  int64_t total() const { return model + gradients + optimizer + compression.total() + kept + evaluation; }
};

// Returns rank 0's memory; other ranks differ by the rounding of their chunks. Builds rank 0's model and
// reducer on the host without peers. This briefly takes as much host memory, except for activations.
RunMemory plan_memory(const TrainConfig& config);

// Returns the plan as lines of text, compared with the free memory of this process's GPUs or with the control
// group's limit.
std::string memory_text(const TrainConfig& config, const RunMemory& memory);
// Throws BadInput if the run needs more than its --memory-limit or, without one and on the host, than the
// control group allows. The message names the required memory and, for a run without --shard, the memory
// with --shard optimizer.
void check_memory_limit(const TrainConfig& config);

// The layout of a model's parameters, which follows the reducer's layout of the gradients.

inline std::vector<GradientTensor> gradient_tensors(const VitConfig& model) {
  std::vector<GradientTensor> tensors;
  for (const VitParameter& parameter : vit_parameters(model))
    tensors.push_back({parameter.name, parameter.shape});
  return tensors;
}

// Returns the reducer's options for the run's settings. Every tensor starts on a multiple of 16 bytes, also
// in the BF16 copy.
inline ReducerOptions reducer_options(const TrainConfig& config, Tracer* tracer = nullptr) {
  return {.bucket_bytes = config.bucket_bytes(),
          .seed = config.seed,
          .alignment = config.precision == Precision::bf16 ? 8 : 4,
          .sharded = config.divides_optimizer(),
          .single_waits = config.overlap_forward,
          .tracer = tracer};
}

// Returns the number of layers whose weight gradients a rank on `device` computes together. A single rank
// sends nothing, so no gradient is awaited.
inline GradientGroups gradient_groups(const TrainConfig& config, const Device& device, int ranks) {
  if (device.is_host()) return {};
  if (ranks == 1) return {.layers = GradientGroups::kMax, .awaited = false};
  return {.layers = config.gradient_group};
}

// Matrices that Dion and Muon leave to AdamW: the embedding of patches and the classifier.
inline constexpr const char* kOuterMatrices[] = {"conv_proj.weight", "heads.head.weight"};

// Returns the matrices that Dion or Muon updates. Dion's are those that the reducer's codec turns into steps.
inline std::vector<FlatMatrix> optimizer_matrices(const TrainConfig& config, const ParameterLayout& layout) {
  std::vector<FlatMatrix> matrices;
  if (!config.uses_dion() && !config.muon) return matrices;
  CompressionSpec spec = config.compression;
  if (config.muon) {
    spec = CompressionSpec();
    spec.method = CompressionSpec::Method::dion;
    spec.dense.assign(std::begin(kOuterMatrices), std::end(kOuterMatrices));
  }
  const std::vector<GradientTensor> tensors = gradient_tensors(config.model);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto [rows, cols] = matrix_of(tensors[i]);
    if (is_dense(spec, {.name = tensors[i].name, .rows = rows, .cols = cols})) continue;
    if (powersgd_rank(spec, rows, cols) == 0) continue;
    matrices.push_back({layout.offsets[i], rows, cols});
  }
  return matrices;
}

inline ParameterLayout reducer_layout(const Reducer& reducer) {
  ParameterLayout layout;
  for (int i = 0; i < reducer.tensors(); ++i) layout.offsets.push_back(reducer.offset(i));
  layout.elements = reducer.elements();
  return layout;
}

}  // namespace gradwire
