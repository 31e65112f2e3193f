#include "trainer/model/vit_index.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "runtime/util/error.h"

namespace gradwire {

VitIndex find_parameters(const std::vector<VitParameter>& parameters, int32_t depth) {
  auto find = [&](const std::string& name) {
    auto at =
        std::find_if(parameters.begin(), parameters.end(), [&](const auto& p) { return p.name == name; });
    if (at == parameters.end()) throw Error(fmt::format("Vit: no parameter named {}", name));
    return static_cast<int>(at - parameters.begin());
  };
  VitIndex index{.head_bias = find("heads.head.bias"),
                 .head_weight = find("heads.head.weight"),
                 .ln_weight = find("encoder.ln.weight"),
                 .ln_bias = find("encoder.ln.bias"),
                 .position = find("encoder.pos_embedding"),
                 .class_token = find("class_token"),
                 .conv_bias = find("conv_proj.bias"),
                 .conv_weight = find("conv_proj.weight"),
                 .layers = {}};
  for (int32_t layer = 0; layer < depth; ++layer) {
    const std::string at = fmt::format("encoder.layers.encoder_layer_{}.", layer);
    index.layers.push_back({.mlp3_bias = find(at + "mlp.3.bias"),
                            .mlp3_weight = find(at + "mlp.3.weight"),
                            .mlp0_bias = find(at + "mlp.0.bias"),
                            .mlp0_weight = find(at + "mlp.0.weight"),
                            .ln2_weight = find(at + "ln_2.weight"),
                            .ln2_bias = find(at + "ln_2.bias"),
                            .out_bias = find(at + "self_attention.out_proj.bias"),
                            .out_weight = find(at + "self_attention.out_proj.weight"),
                            .in_bias = find(at + "self_attention.in_proj_bias"),
                            .in_weight = find(at + "self_attention.in_proj_weight"),
                            .ln1_weight = find(at + "ln_1.weight"),
                            .ln1_bias = find(at + "ln_1.bias")});
  }
  return index;
}

}  // namespace gradwire
