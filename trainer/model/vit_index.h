#pragma once

#include <cstdint>
#include <vector>

#include "trainer/model/parameters.h"

namespace gradwire {

// Where the parameters of one layer stand in the list of parameters.
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
