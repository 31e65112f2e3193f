// The index of each of the model's parameters in the list of vit_parameters().
#pragma once

#include <cstdint>
#include <vector>

#include "trainer/model/parameters.h"

namespace gradwire {

struct VitLayerIndex {
  int mlp3_bias, mlp3_weight, mlp0_bias, mlp0_weight, ln2_weight, ln2_bias;
  int out_bias, out_weight, in_bias, in_weight, ln1_weight, ln1_bias;
};
struct VitIndex {
  int head_bias, head_weight, ln_weight, ln_bias, position, class_token, conv_bias, conv_weight;
  std::vector<VitLayerIndex> layers;
};

VitIndex find_parameters(const std::vector<VitParameter>& parameters, int32_t depth);

}  // namespace gradwire
