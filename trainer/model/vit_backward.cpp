// The loss and the backward pass, in reading order: the model, then one layer.
#include <algorithm>

#include "kernels/vit/vit.h"
#include "runtime/util/error.h"
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
  GradientOutput to(gradients, layout_, accumulate, ready);
  backward_head(labels, totals, grad_scale, to);
  for (int64_t top = std::ssize(a_.layers) - 1; top >= 0;) {
    const int64_t left = top + 1, most = options_.groups.awaited ? std::max<int64_t>(1, left - 2) : left;
    const LayerGroup group{top, std::min(group_layers_, most)};
    for (int64_t slot = 0; slot < group.count; ++slot) backward_layer(group, slot, to);
    to.flush(stream_);
    top -= group.count;
  }
  backward_embedding(to);
}

// Computes the loss and runs backward through the head and the last norm.
template <typename S>
void TypedVitPasses<S>::backward_head(const int32_t* labels, double* totals, float grad_scale,
                                      GradientOutput& to) {
  // The head is small. To save launches, report its gradients with the gradients of the first group of
  // layers.
  to.defer_sums = group_layers_ > 1;
  const int64_t t = config_.tokens(), c = config_.width, k = config_.classes;
  cross_entropy<S>(stream_, {.logits = a_.logits,
                             .labels = labels,
                             .d_logits = a_.d_logits,
                             .totals = totals,
                             .workspace = a_.loss_workspace,
                             .rows = batch_,
                             .classes = k,
                             .grad_scale = grad_scale,
                             .accumulate = to.accumulate});
  const ColumnSum<S> head_bias{.x = a_.d_logits,
                               .sum = to.at(index_.head_bias),
                               .workspace = a_.head_bias_sums,
                               .rows = batch_,
                               .width = k,
                               .accumulate = to.accumulate,
                               .partial_only = to.defer_sums};
  if (to.defer_sums && batch_ <= kMaxChunks) {
    to.report(head_bias.of_rows(), {index_.head_bias});
  } else {
    column_sum(stream_, head_bias);
    to.report(head_bias.sums(), {index_.head_bias});
  }
  product(true, false, k, c, batch_, a_.d_logits, a_.features, to.at(index_.head_weight), to.beta());
  to.report({index_.head_weight});
  product(false, false, batch_, c, k, a_.d_logits, operand(index_.head_weight), a_.d_features);

  // The head gives a gradient only to the class token's rows.
  clear_dx();
  const LayerNormBackward<S> norm{.x = a_.x_last,
                                  .dy = a_.d_features,
                                  .gamma = weight(index_.ln_weight),
                                  .mean = a_.mean,
                                  .rstd = a_.rstd,
                                  .dx = a_.dx,
                                  .dx_rounded = a_.dx_mlp.of(0),
                                  .d_gamma = to.at(index_.ln_weight),
                                  .d_beta = to.at(index_.ln_bias),
                                  .dx_sum = to.at(index_.layers.back().mlp3_bias),
                                  .workspace = a_.head_norm_sums,
                                  .rows = batch_,
                                  .width = c,
                                  .x_stride = t * c,
                                  .accumulate = to.accumulate,
                                  .partial_only = to.defer_sums};
  layer_norm_backward(stream_, norm);
  to.report(norm.sums(), {index_.ln_weight, index_.ln_bias, index_.layers.back().mlp3_bias});
}

template <typename S>
void TypedVitPasses<S>::backward_embedding(GradientOutput& to) {
  const int64_t t = config_.tokens(), c = config_.width;
  assemble_tokens_backward<S>(stream_, {.dx = a_.dx,
                                        .d_projected = a_.qkv,
                                        .d_bias = to.at(index_.conv_bias),
                                        .d_class_token = to.at(index_.class_token),
                                        .d_position = to.at(index_.position),
                                        .workspace = a_.token_sums,
                                        .batch = batch_,
                                        .tokens = t,
                                        .width = c,
                                        .accumulate = to.accumulate});
  to.report({index_.position, index_.class_token, index_.conv_bias});
  product(true, false, c, patch_elements(), batch_ * (t - 1), a_.qkv, a_.patches, to.at(index_.conv_weight),
          to.beta());
  to.report({index_.conv_weight});
}

// dx and the operand derived from it, if any, are adjacent.
template <typename S>
void TypedVitPasses<S>::clear_dx() const {
  const int64_t count = batch_ * config_.tokens() * config_.width;
  const void* end = a_.dx + count;
  if (a_.dx_mlp.base != nullptr) end = a_.dx_mlp.base + count;
  fill_zero(stream_, a_.dx,
            static_cast<size_t>(static_cast<const char*>(end) - reinterpret_cast<const char*>(a_.dx)));
}

template <typename S>
template <typename Dy, typename X>
void TypedVitPasses<S>::weight_gradient(const LayerGroup& group, int64_t slot, int VitLayerIndex::*weight,
                                        int64_t out, int64_t in, const Dy& dy_of, const X& x_of,
                                        GradientOutput& to) const {
  auto parameter = [&](int64_t of) { return index_.layers[static_cast<size_t>(group.layer(of))].*weight; };
  if (slot + 1 < group.count) return to.defer(parameter(slot));
  Gemm args = dense(true, false, out, in, batch_ * config_.tokens(), static_cast<const S*>(dy_of(0)),
                    static_cast<const S*>(x_of(0)), to.at(parameter(0)), to.beta());
  args.batch = group.count;
  if (group.count > 1) {
    args.stride_a = dy_of(1) - dy_of(0);
    args.stride_b = x_of(1) - x_of(0);
    args.stride_c = to.at(parameter(1)) - to.at(parameter(0));
  }
  gemm(stream_, args);
  to.report({parameter(slot)});
}

// Runs backward through a layer. On entry a_.dx holds the gradient with respect to the layer's output, on
// exit the gradient with respect to the layer's input. The sum of the rows of dx is the gradient of the
// preceding bias: the op that wrote dx has already computed mlp3_bias.
template <typename S>
void TypedVitPasses<S>::backward_layer(const LayerGroup& group, int64_t slot, GradientOutput& to) {
  const auto layer = static_cast<size_t>(group.layer(slot));
  const LayerActivations& l = a_.layers[layer];
  const VitLayerIndex& at = index_.layers[layer];
  const int64_t c = config_.width, f = config_.mlp, rows = batch_ * config_.tokens();
  // Saves one launch per sum if gradients may be reported together. After layer 0, too little computation
  // follows to hide a later exchange.
  to.defer_sums = layer > 0 || !options_.groups.awaited;
  auto kept = [&](S* LayerActivations::*of) {
    return [&, of](int64_t in_slot) { return a_.layers[static_cast<size_t>(group.layer(in_slot))].*of; };
  };
  const S* dx_attention = dx_operand(a_.dx_attention.of(slot));
  LayerNormBackward<S> norm{.dy = a_.d_branch,
                            .dx = a_.dx,
                            .rows = rows,
                            .width = c,
                            .accumulate_dx = true,
                            .accumulate = to.accumulate,
                            .partial_only = to.defer_sums};

  // Backward of the MLP branch.
  weight_gradient(
      group, slot, &VitLayerIndex::mlp3_weight, c, f,
      [&](int64_t in_slot) { return dx_operand(a_.dx_mlp.of(in_slot)); }, kept(&LayerActivations::gelu), to);
  backward_gelu(group, slot, to);
  weight_gradient(group, slot, &VitLayerIndex::mlp0_weight, f, c, kept(&LayerActivations::d_pre),
                  kept(&LayerActivations::ln2), to);
  product<S>(false, false, rows, c, f, l.d_pre, operand(at.mlp0_weight), a_.d_branch);
  norm.x = l.x_mid, norm.mean = l.mean2, norm.rstd = l.rstd2, norm.gamma = weight(at.ln2_weight);
  norm.d_gamma = to.at(at.ln2_weight), norm.d_beta = to.at(at.ln2_bias), norm.dx_sum = to.at(at.out_bias);
  norm.workspace = a_.ln2_sums.of(slot);
  norm.dx_rounded = a_.dx_attention.of(slot);
  layer_norm_backward(stream_, norm);
  to.report(norm.sums(), {at.ln2_weight, at.ln2_bias, at.out_bias});

  // Backward of the attention branch.
  weight_gradient(
      group, slot, &VitLayerIndex::out_weight, c, c,
      [&](int64_t in_slot) { return dx_operand(a_.dx_attention.of(in_slot)); },
      kept(&LayerActivations::merged), to);
  product(false, false, rows, c, c, dx_attention, operand(at.out_weight), a_.d_branch);
  backward_attention(layer, slot, to);
  weight_gradient(
      group, slot, &VitLayerIndex::in_weight, 3 * c, c,
      [&](int64_t in_slot) { return d_qkv(a_.layers[static_cast<size_t>(group.layer(in_slot))], in_slot); },
      kept(&LayerActivations::ln1), to);
  product<S>(false, false, rows, c, 3 * c, d_qkv(l, slot), operand(at.in_weight), a_.d_branch);
  norm.x = l.x, norm.mean = l.mean1, norm.rstd = l.rstd1, norm.gamma = weight(at.ln1_weight);
  norm.d_gamma = to.at(at.ln1_weight), norm.d_beta = to.at(at.ln1_bias);
  norm.dx_sum = layer > 0 ? to.at(index_.layers[layer - 1].mlp3_bias) : nullptr;
  norm.workspace = a_.ln1_sums.of(slot);
  // The MLP of the next layer in backward reads dx_rounded. The embedding reads dx.
  norm.dx_rounded = layer > 0 ? a_.dx_mlp.of(slot + 1 < group.count ? slot + 1 : 0) : nullptr;
  layer_norm_backward(stream_, norm);
  to.report(norm.sums(), {at.ln1_weight, at.ln1_bias});
  if (layer > 0) to.report({index_.layers[layer - 1].mlp3_bias});
}

template <typename S>
void TypedVitPasses<S>::backward_gelu(const LayerGroup& group, int64_t slot, GradientOutput& to) {
  const LayerActivations& l = a_.layers[static_cast<size_t>(group.layer(slot))];
  auto index = [&](int64_t of) -> const VitLayerIndex& {
    return index_.layers[static_cast<size_t>(group.layer(of))];
  };
  const int mlp0_bias = index(slot).mlp0_bias;
  const int64_t c = config_.width, f = config_.mlp, rows = batch_ * config_.tokens();
  Gemm args = dense(false, false, rows, f, c, dx_operand(a_.dx_mlp.of(slot)),
                    operand(index(slot).mlp3_weight), options_.fused_gelu ? l.d_pre : a_.d_gelu, 0.0f);
  if (!options_.fused_gelu) {
    gemm(stream_, args);
    const BiasGeluBackward<S> gelu{.pre = l.pre,
                                   .dy = a_.d_gelu,
                                   .d_pre = l.d_pre,
                                   .d_bias = to.at(mlp0_bias),
                                   .workspace = a_.mlp0_sums.of(slot),
                                   .rows = rows,
                                   .width = f,
                                   .accumulate = to.accumulate,
                                   .partial_only = to.defer_sums,
                                   .form = config_.gelu};
    bias_gelu_backward(stream_, gelu);
    return to.report(gelu.sums(), {mlp0_bias});
  }
  args.epilogue = Epilogue::d_gelu_tanh;
  args.aux = l.pre;
  gemm(stream_, args);
  // The product does not sum its rows. Sum the rows of all layers of the group at once, as for weight
  // gradients.
  if (slot + 1 < group.count) return to.defer(mlp0_bias);
  auto d_pre = [&](int64_t of) { return a_.layers[static_cast<size_t>(group.layer(of))].d_pre; };
  const ColumnSum<S> sum{.x = d_pre(0),
                         .sum = to.at(mlp0_bias),
                         .workspace = a_.mlp0_sums.of(0),
                         .rows = rows,
                         .width = f,
                         .accumulate = to.accumulate,
                         .partial_only = to.defer_sums,
                         .batch = group.count,
                         .stride = group.count > 1 ? d_pre(1) - d_pre(0) : 0};
  column_sum(stream_, sum);
  for (int64_t of = 0; of < slot; ++of) to.add_partial(sum.sums(of, to.at(index(of).mlp0_bias)));
  to.report(sum.sums(slot, to.at(mlp0_bias)), {mlp0_bias});
}

template <typename S>
void TypedVitPasses<S>::backward_attention(size_t layer, int64_t slot, GradientOutput& to) {
  const LayerActivations& l = a_.layers[layer];
  const VitLayerIndex& at = index_.layers[layer];
  const int64_t t = config_.tokens(), d = config_.head_dim(), tp = padded_tokens();
  if (options_.fused_attention) {
    const AttentionBackward<S> args{.qkv = l.qkv,
                                    .merged = l.merged,
                                    .d_merged = a_.d_branch,
                                    .statistics = l.statistics,
                                    .d_qkv = d_qkv(l, slot),
                                    .d_bias = to.at(at.in_bias),
                                    .workspace = a_.in_sums.of(slot),
                                    .batch = batch_,
                                    .tokens = t,
                                    .heads = config_.heads,
                                    .head_dim = d,
                                    .accumulate = to.accumulate,
                                    .partial_only = to.defer_sums};
    attention_backward(stream_, args);
    to.report(args.sums(), {at.in_bias});
    return;
  }
  split_heads<S>(stream_, {.rows = a_.d_branch,
                           .parts = {a_.heads_out},
                           .batch = batch_,
                           .tokens = t,
                           .heads = config_.heads,
                           .head_dim = d});
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
  merge_heads<S>(stream_, {.rows = d_qkv(l, slot),
                           .parts = {a_.dq, a_.dk, a_.dv},
                           .batch = batch_,
                           .tokens = t,
                           .heads = config_.heads,
                           .head_dim = d});
  column_sum<S>(stream_, {.x = d_qkv(l, slot),
                          .sum = to.at(at.in_bias),
                          .workspace = a_.in_sums.of(slot),
                          .rows = batch_ * t,
                          .width = 3 * config_.width,
                          .accumulate = to.accumulate});
  to.report({at.in_bias});
}

template void TypedVitPasses<float>::evaluate(const int32_t*, double*);
template void TypedVitPasses<Bf16>::evaluate(const int32_t*, double*);
template void TypedVitPasses<float>::backward(const int32_t*, double*, float, float*, bool,
                                              const std::function<void(int)>&);
template void TypedVitPasses<Bf16>::backward(const int32_t*, double*, float, float*, bool,
                                             const std::function<void(int)>&);

}  // namespace gradwire
