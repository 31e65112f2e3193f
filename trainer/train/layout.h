// The layout of a model's parameters, which follows the reducer's layout of their gradients.
#pragma once

#include <vector>

#include "collectives/reducer/reducer.h"
#include "trainer/model/parameters.h"

namespace gradwire {

inline std::vector<GradientTensor> gradient_tensors(const VitConfig& model) {
  std::vector<GradientTensor> tensors;
  for (const VitParameter& parameter : vit_parameters(model))
    tensors.push_back({parameter.name, parameter.shape});
  return tensors;
}

// In elements. Every tensor starts on a multiple of 16 bytes, in the BF16 copy as well.
inline int64_t tensor_alignment(Precision precision) {
  return precision == Precision::bf16 ? 8 : 4;
}

inline ParameterLayout reducer_layout(const Reducer& reducer) {
  ParameterLayout layout;
  for (int i = 0; i < reducer.tensors(); ++i) layout.offsets.push_back(reducer.offset(i));
  layout.elements = reducer.elements();
  return layout;
}

}  // namespace gradwire
