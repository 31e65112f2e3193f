// The loss and the backward pass, in reading order: the model, then one layer.
#include "kernels/vit/vit.h"
#include "runtime/error.h"
#include "trainer/model/typed_vit_passes.h"

namespace gradwire {

template <typename S>
void TypedVitPasses<S>::evaluate(const int32_t* labels, double* totals) {
  cross_entropy<float>(stream_, {.logits = a_.logits,
                                 .labels = labels,
                                 .totals = totals,
                                 .workspace = a_.loss_workspace,
                                 .rows = batch_,
                                 .classes = config_.classes});
}

template <typename S>
void TypedVitPasses<S>::backward(const int32_t* labels, double* totals, float grad_scale, float* gradients,
                                 bool accumulate, const std::function<void(int)>& ready) {
  if (!options_.training) throw Error("Vit::backward: this model was created with training=false");
  VitGradients to{gradients, options_.gradients, accumulate, ready};
  const int64_t t = config_.tokens(), c = config_.width, k = config_.classes;

  cross_entropy<S>(stream_, {.logits = a_.logits,
                             .labels = labels,
                             .d_logits = a_.d_logits,
                             .totals = totals,
                             .workspace = a_.loss_workspace,
                             .rows = batch_,
                             .classes = k,
                             .grad_scale = grad_scale});
  column_sum<S>(stream_, {.x = a_.d_logits,
                          .sum = to.at(index_.head_bias),
                          .workspace = a_.mlp0_sums,
                          .rows = batch_,
                          .width = k,
                          .accumulate = accumulate});
  to.done({index_.head_bias});
  product(true, false, k, c, batch_, a_.d_logits, a_.features, to.at(index_.head_weight), to.beta());
  to.done({index_.head_weight});
  enters(0, 1);
  product(false, false, batch_, c, k, a_.d_logits, operand(index_.head_weight), a_.d_features);

  // Rows other than the class token's get no gradient from the head.
  fill_zero(stream_, a_.dx, static_cast<size_t>(batch_ * t * c) * sizeof(float));
  if constexpr (!kInPlace) fill_zero(stream_, a_.dx_rounded, static_cast<size_t>(batch_ * t * c) * sizeof(S));
  layer_norm_backward<S>(stream_, {.x = a_.x_last,
                                   .dy = a_.d_features,
                                   .gamma = weight(index_.ln_weight),
                                   .mean = a_.mean,
                                   .rstd = a_.rstd,
                                   .dx = a_.dx,
                                   .dx_rounded = a_.dx_rounded,
                                   .d_gamma = to.at(index_.ln_weight),
                                   .d_beta = to.at(index_.ln_bias),
                                   .dx_sum = to.at(index_.layers.back().mlp3_bias),
                                   .workspace = a_.ln1_sums,
                                   .rows = batch_,
                                   .width = c,
                                   .x_stride = t * c,
                                   .accumulate = accumulate});
  to.done({index_.ln_weight, index_.ln_bias, index_.layers.back().mlp3_bias});

  for (size_t layer = a_.layers.size(); layer-- > 0;) backward_layer(layer, to);

  assemble_tokens_backward<S>(stream_, {.dx = a_.dx,
                                        .d_projected = a_.qkv,
                                        .d_bias = to.at(index_.conv_bias),
                                        .d_class_token = to.at(index_.class_token),
                                        .d_position = to.at(index_.position),
                                        .batch = batch_,
                                        .tokens = t,
                                        .width = c,
                                        .accumulate = accumulate});
  to.done({index_.position, index_.class_token, index_.conv_bias});
  product(true, false, c, patch_elements(), batch_ * (t - 1), a_.qkv, a_.patches, to.at(index_.conv_weight),
          to.beta());
  to.done({index_.conv_weight});
}

// On entry a_.dx holds the gradient by the layer's output, on exit the gradient by its input. The sum of its rows is the
// gradient of the bias before it: mlp3_bias was done by whoever wrote dx.
template <typename S>
void TypedVitPasses<S>::backward_layer(size_t layer, VitGradients& to) {
  const LayerActivations& l = a_.layers[layer];
  const VitLayerIndex& at = index_.layers[layer];
  const int64_t c = config_.width, f = config_.mlp, rows = batch_ * config_.tokens();
  enters(block_of(layer), layer > 0 ? block_of(layer - 1) : -1);  // the embedding's weights are not used
  // A launch less per sum, if their gradients may be reported together. Nothing follows to hide the exchange of the last
  // layer's.
  to.postpones = layer > 0;
  // Weight (out, in) of a product y = x W^T: dW = dy^T x.
  auto weight_gradient = [&](int64_t out, int64_t in, const S* dy, const S* x, int parameter) {
    product(true, false, out, in, rows, dy, x, to.at(parameter), to.beta());
    to.done({parameter});
  };
  LayerNormBackward<S> norm{.dy = a_.d_branch,
                            .dx = a_.dx,
                            .dx_rounded = a_.dx_rounded,
                            .rows = rows,
                            .width = c,
                            .accumulate_dx = true,
                            .accumulate = to.accumulate,
                            .partial_only = to.postpones};

  // The MLP branch.
  weight_gradient(c, f, dx_operand(), l.gelu, at.mlp3_weight);
  product(false, false, rows, f, c, dx_operand(), operand(at.mlp3_weight), a_.d_mlp);
  const BiasGeluBackward<S> gelu{.pre = l.pre,
                                 .dy = a_.d_mlp,
                                 .d_bias = to.at(at.mlp0_bias),
                                 .workspace = a_.mlp0_sums,
                                 .rows = rows,
                                 .width = f,
                                 .accumulate = to.accumulate,
                                 .partial_only = to.postpones};
  bias_gelu_backward(stream_, gelu);
  to.done(gelu.sums(), {at.mlp0_bias});
  weight_gradient(f, c, a_.d_mlp, l.ln2, at.mlp0_weight);
  product(false, false, rows, c, f, a_.d_mlp, operand(at.mlp0_weight), a_.d_branch);
  norm.x = l.x_mid, norm.mean = l.mean2, norm.rstd = l.rstd2, norm.gamma = weight(at.ln2_weight);
  norm.d_gamma = to.at(at.ln2_weight), norm.d_beta = to.at(at.ln2_bias), norm.dx_sum = to.at(at.out_bias);
  norm.workspace = a_.ln2_sums;
  layer_norm_backward(stream_, norm);
  to.done(norm.sums(), {at.ln2_weight, at.ln2_bias, at.out_bias});

  // The attention branch.
  weight_gradient(c, c, dx_operand(), l.merged, at.out_weight);
  product(false, false, rows, c, c, dx_operand(), operand(at.out_weight), a_.d_branch);
  backward_attention(layer, to);
  weight_gradient(3 * c, c, a_.qkv, l.ln1, at.in_weight);
  product(false, false, rows, c, 3 * c, a_.qkv, operand(at.in_weight), a_.d_branch);
  norm.x = l.x, norm.mean = l.mean1, norm.rstd = l.rstd1, norm.gamma = weight(at.ln1_weight);
  norm.d_gamma = to.at(at.ln1_weight), norm.d_beta = to.at(at.ln1_bias);
  norm.dx_sum = layer > 0 ? to.at(index_.layers[layer - 1].mlp3_bias) : nullptr;
  norm.workspace = a_.ln1_sums;
  layer_norm_backward(stream_, norm);
  to.done(norm.sums(), {at.ln1_weight, at.ln1_bias});
  if (layer > 0) to.done({index_.layers[layer - 1].mlp3_bias});
  to.finish_sums(stream_);
}

template <typename S>
void TypedVitPasses<S>::backward_attention(size_t layer, VitGradients& to) {
  const LayerActivations& l = a_.layers[layer];
  const VitLayerIndex& at = index_.layers[layer];
  const int64_t t = config_.tokens(), d = config_.head_dim(), tp = padded_tokens();
  if (options_.fused_attention) {
    const AttentionBackward<S> args{.qkv = l.qkv,
                                    .merged = l.merged,
                                    .d_merged = a_.d_branch,
                                    .statistics = l.statistics,
                                    .d_qkv = a_.qkv,
                                    .d_bias = to.at(at.in_bias),
                                    .workspace = a_.in_sums,
                                    .batch = batch_,
                                    .tokens = t,
                                    .heads = config_.heads,
                                    .head_dim = d,
                                    .accumulate = to.accumulate,
                                    .partial_only = to.postpones};
    attention_backward(stream_, args);
    to.done(args.sums(), {at.in_bias});
    return;
  }
  merge_heads<S>(stream_, {.in = a_.d_branch,
                           .out = a_.heads_out,
                           .batch = batch_,
                           .tokens = t,
                           .heads = config_.heads,
                           .head_dim = d,
                           .inverse = true});
  attention_product(true, false, d, t, l.attention, tp, a_.heads_out, d, a_.dv, d);
  attention_product(false, true, t, d, a_.heads_out, d, l.v, d, a_.d_attention, tp);
  softmax_backward<S>(stream_, {.y = l.attention,
                                .dy = a_.d_attention,
                                .rows = batch_ * config_.heads * t,
                                .width = t,
                                .ld = tp,
                                .scale = attention_scale()});
  attention_product(false, false, d, t, a_.d_attention, tp, l.k, d, a_.dq, d);
  attention_product(true, false, d, t, a_.d_attention, tp, l.q, d, a_.dk, d);
  split_heads_backward<S>(stream_, {.dq = a_.dq,
                                    .dk = a_.dk,
                                    .dv = a_.dv,
                                    .d_qkv = a_.qkv,
                                    .batch = batch_,
                                    .tokens = t,
                                    .heads = config_.heads,
                                    .head_dim = d});
  column_sum<S>(stream_, {.x = a_.qkv,
                          .sum = to.at(at.in_bias),
                          .workspace = a_.in_sums,
                          .rows = batch_ * t,
                          .width = 3 * config_.width,
                          .accumulate = to.accumulate});
  to.done({at.in_bias});
}

template void TypedVitPasses<float>::evaluate(const int32_t*, double*);
template void TypedVitPasses<Bf16>::evaluate(const int32_t*, double*);
template void TypedVitPasses<float>::backward(const int32_t*, double*, float, float*, bool,
                                              const std::function<void(int)>&);
template void TypedVitPasses<Bf16>::backward(const int32_t*, double*, float, float*, bool,
                                             const std::function<void(int)>&);

}  // namespace gradwire
