// How a model's parameters are laid out by the reducer that averages their gradients.
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

// Elements at whose multiples tensors begin, so that each is on a multiple of 16 bytes, its BF16 copy too.
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
