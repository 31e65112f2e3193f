// The forward pass, in reading order: the model, then one layer.

#include "kernels/vit/vit.h"
#include "runtime/util/error.h"
#include "trainer/model/typed_vit_passes.h"

namespace gradwire {

template <typename S>
void TypedVitPasses<S>::forward(const float* images, int64_t batch) {
  if (batch < 0 || batch > options_.max_batch) {
    throw Error("Vit::forward: {} images, max_batch is {}", batch, options_.max_batch);
  }
  batch_ = batch;
  const int64_t t = config_.tokens(), c = config_.width;
  patchify<S>(stream_, {.images = images,
                        .patches = a_.patches,
                        .batch = batch,
                        .channels = config_.channels,
                        .image = config_.image,
                        .patch = config_.patch});
  const int embedding = block_of(0) + 1;
  enter_block(embedding);
  // The projection writes to a_.qkv, a scratch buffer that is still unused.
  product(false, true, batch * (t - 1), c, patch_elements(), a_.patches, operand(index_.conv_weight), a_.qkv);
  assemble_tokens<S>(stream_, {.projected = a_.qkv,
                               .bias = weight(index_.conv_bias),
                               .class_token = weight(index_.class_token),
                               .position = weight(index_.position),
                               .x = a_.layers[0].x,
                               .batch = batch,
                               .tokens = t,
                               .width = c});
  for (size_t layer = 0; layer < a_.layers.size(); ++layer) {
    forward_layer(layer, branch_of(layer + 1 < a_.layers.size() ? a_.layers[layer + 1].x : a_.x_last));
  }
  enter_block(0);
  // Only the class token reaches the head, so only the class token's rows are completed and normalized.
  layer_norm<S>(stream_, {.x = a_.layers.back().x_mid,
                          .gamma = weight(index_.ln_weight),
                          .beta = weight(index_.ln_bias),
                          .y = a_.features,
                          .mean = a_.mean,
                          .rstd = a_.rstd,
                          .rows = batch,
                          .width = c,
                          .x_stride = t * c,
                          .branch = branch_of(a_.x_last),
                          .branch_bias = weight(index_.layers.back().mlp3_bias),
                          .sum = a_.x_last});
  product(false, true, batch, config_.classes, c, a_.features, operand(index_.head_weight), a_.logits, 0.0f,
          weight(index_.head_bias));
}

// Runs a layer. The next layer's first layer norm adds the bias and residual of the layer's last product. So
// on entry, except in the first layer, l.x or a_.branch holds the product without bias and residual.
template <typename S>
void TypedVitPasses<S>::forward_layer(size_t layer, S* branch_out) {
  const LayerActivations& l = a_.layers[layer];
  const VitLayerIndex& at = index_.layers[layer];
  const int64_t c = config_.width, f = config_.mlp, rows = batch_ * config_.tokens();

  enter_block(block_of(layer));
  // Computes x_mid = x + out_proj(attention(ln_1(x))).
  const bool joins = layer > 0;
  layer_norm<S>(stream_, {.x = joins ? a_.layers[layer - 1].x_mid : l.x,
                          .gamma = weight(at.ln1_weight),
                          .beta = weight(at.ln1_bias),
                          .y = l.ln1,
                          .mean = l.mean1,
                          .rstd = l.rstd1,
                          .rows = rows,
                          .width = c,
                          .branch = joins ? branch_of(l.x) : nullptr,
                          .branch_bias = joins ? weight(index_.layers[layer - 1].mlp3_bias) : nullptr,
                          .sum = joins ? l.x : nullptr});
  forward_attention(layer);
  product(false, true, rows, c, c, l.merged, operand(at.out_weight), branch_of(l.x_mid));

  // Computes x_out = x_mid + mlp.3(GELU(mlp.0(ln_2(x_mid)))).
  layer_norm<S>(stream_, {.x = l.x,
                          .gamma = weight(at.ln2_weight),
                          .beta = weight(at.ln2_bias),
                          .y = l.ln2,
                          .mean = l.mean2,
                          .rstd = l.rstd2,
                          .rows = rows,
                          .width = c,
                          .branch = branch_of(l.x_mid),
                          .branch_bias = weight(at.out_bias),
                          .sum = l.x_mid});
  Gemm up = dense(false, true, rows, f, c, l.ln2, operand(at.mlp0_weight),
                  options_.fused_gelu ? l.gelu : l.pre, 0.0f, operand(at.mlp0_bias));
  if (options_.fused_gelu) {
    up.epilogue = Epilogue::gelu_tanh;
    if (options_.training) up.aux = l.pre;
    gemm(stream_, up);
  } else {
    gemm(stream_, up);
    bias_gelu<S>(stream_, {.x = l.pre, .y = l.gelu, .rows = rows, .width = f, .form = config_.gelu});
  }
  product(false, true, rows, c, f, l.gelu, operand(at.mlp3_weight), branch_out);
}

template <typename S>
void TypedVitPasses<S>::forward_attention(size_t layer) {
  const LayerActivations& l = a_.layers[layer];
  const VitLayerIndex& at = index_.layers[layer];
  const int64_t t = config_.tokens(), c = config_.width, rows = batch_ * t;
  const int64_t d = config_.head_dim(), tp = padded_tokens();
  if (options_.fused_attention) {
    product(false, true, rows, 3 * c, c, l.ln1, operand(at.in_weight), l.qkv, 0.0f, operand(at.in_bias));
    attention<S>(stream_, {.qkv = l.qkv,
                           .merged = l.merged,
                           .statistics = options_.training ? l.statistics : nullptr,
                           .batch = batch_,
                           .tokens = t,
                           .heads = config_.heads,
                           .head_dim = d});
    return;
  }
  product(false, true, rows, 3 * c, c, l.ln1, operand(at.in_weight), a_.qkv);
  split_heads<S>(stream_, {.rows = a_.qkv,
                           .parts = {l.q, l.k, l.v},
                           .batch = batch_,
                           .tokens = t,
                           .heads = config_.heads,
                           .head_dim = d,
                           .bias = weight(at.in_bias)});
  attention_product(false, true, t, d, l.q, d, l.k, d, scores_of(l.attention), tp);
  softmax<S>(stream_, {.x = scores_of(l.attention),
                       .y = l.attention,
                       .rows = batch_ * config_.heads * t,
                       .width = t,
                       .ld = tp,
                       .scale = attention_scale()});
  attention_product(false, false, d, t, l.attention, tp, l.v, d, a_.heads_out, d);
  merge_heads<S>(stream_, {.rows = l.merged,
                           .parts = {a_.heads_out},
                           .batch = batch_,
                           .tokens = t,
                           .heads = config_.heads,
                           .head_dim = d});
}

template void TypedVitPasses<float>::forward(const float*, int64_t);
template void TypedVitPasses<Bf16>::forward(const float*, int64_t);

}  // namespace gradwire
