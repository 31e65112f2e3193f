// The layout of a model's parameters, which follows the reducer's layout of the gradients.
#pragma once

#include <iterator>
#include <vector>

#include "collectives/codec/policy_codec.h"
#include "collectives/reducer/reducer.h"
#include "trainer/model/parameters.h"
#include "trainer/model/vit_passes.h"
#include "trainer/train/muon.h"

namespace gradwire {

inline std::vector<GradientTensor> gradient_tensors(const VitConfig& model) {
  std::vector<GradientTensor> tensors;
  for (const VitParameter& parameter : vit_parameters(model))
    tensors.push_back({parameter.name, parameter.shape});
  return tensors;
}

// Returns the alignment of tensors in elements. Every tensor starts on a multiple of 16 bytes, also in the
// BF16 copy.
inline int64_t tensor_alignment(Precision precision) {
  return precision == Precision::bf16 ? 8 : 4;
}

// Returns the reducer's options for the run's settings.
inline ReducerOptions reducer_options(const TrainConfig& config, Tracer* tracer = nullptr) {
  return {.bucket_bytes = config.bucket_bytes(),
          .seed = config.seed,
          .alignment = tensor_alignment(config.precision),
          .sharded = config.divides_optimizer(),
          .single_waits = config.overlap_forward,
          .tracer = tracer};
}

// Returns the number of layers whose weight gradients a rank on `device` computes together. A single rank
// sends nothing, so no gradient is awaited.
inline GradientGroups gradient_groups(const TrainConfig& config, const Device& device, int ranks) {
  if (device.is_host()) return {};
  if (ranks == 1) return {.layers = GradientGroups::kMost, .awaited = false};
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
