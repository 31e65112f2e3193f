#include "trainer/model/vit.h"

#include <algorithm>
#include <string>

#include "kernels/wire/format.h"
#include "runtime/util/error.h"

namespace gradwire {

Vit::Vit(const VitConfig& config, const Stream& stream, ParameterLayout layout, Options options)
    : config_(config), stream_(stream), parameters_(vit_parameters(config)), layout_(std::move(layout)) {
  check_model(config);
  if (options.fused_gelu.value_or(false) && config.gelu != Gelu::tanh)
    throw BadInput("Vit: fused_gelu is for the tanh form of GELU");
  if (options.max_batch < 1) throw BadInput("Vit: max_batch is {}", options.max_batch);
  if (layout_.offsets.size() != parameters_.size()) {
    throw Error("Vit: the layout has {} tensors, the model {} parameters", layout_.offsets.size(),
                parameters_.size());
  }
  const bool rounds = options.precision == Precision::bf16;
  if (options.share != nullptr) {
    weights_ = options.share->weights_;
    rounded_ = options.share->rounded_;
    if (options.share->layout_.elements < layout_.elements || static_cast<bool>(rounded_) != rounds) {
      throw Error("Vit: the shared weights have another layout or precision");
    }
  } else {
    weights_ = make_buffer<float>(stream_.device(), layout_.elements);
    fill_zero(stream_, weights_.data(), weights_.bytes());  // zeroes the gaps, which no other code writes
    stream_.synchronize();                                  // waits before an exception can free the memory
    if (rounds) rounded_ = make_buffer<Bf16>(stream_.device(), layout_.elements);
  }
  passes_ = make_vit_passes(config_, stream_, parameters_, layout_,
                            {.max_batch = options.max_batch,
                             .precision = options.precision,
                             .training = options.training,
                             .weights = weights_,
                             .rounded_weights = rounded_,
                             .enter_block = options.enter_block,
                             .fused_attention = options.fused_attention.value_or(
                                 fuses_attention(stream_.device(), config_, options.precision)),
                             .fused_gelu = options.fused_gelu.value_or(fuses_gelu(stream_.device(), config_)),
                             .groups = options.groups});
}

void Vit::load(std::span<const float> values) {
  if (static_cast<int64_t>(values.size()) != layout_.elements) {
    throw Error("Vit::load: got {} values, expected {}", values.size(), layout_.elements);
  }
  to_device(stream_, weights_.as<float>(), values);
  round_weights();
}

void Vit::round_weights() {
  if (!rounded_) return;
  // The encoder of the wire format rounds to the nearest BF16.
  kBf16->reduce_encode(stream_,
                       {.own = weights_.as<float>(), .wire = rounded_.as<Bf16>(), .count = layout_.elements});
}

double training_flops_per_image(const VitConfig& config) {
  const double t = config.tokens(), c = config.width, f = config.mlp;
  const double pixels = double{1} * config.channels * config.patch * config.patch;
  const double projections = t * c * 3 * c + t * c * c;
  const double attention = 2 * t * t * c;  // scores and weighted sums of v, over all heads
  const double mlp = 2 * t * c * f;
  const double layers = config.depth * (projections + attention + mlp);
  const double patches = (t - 1) * c * pixels, head = c * config.classes;
  return 2 * (3 * layers + 2 * patches + 3 * head);
}

VitIndex find_parameters(const std::vector<VitParameter>& parameters, int32_t depth) {
  auto find = [&](const std::string& name) {
    auto at = std::ranges::find(parameters, name, &VitParameter::name);
    if (at == parameters.end()) throw Error("Vit: no parameter named {}", name);
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
