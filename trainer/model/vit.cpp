// The forward and backward pass, in reading order: set-up, forward, one layer's forward, backward, one
// layer's backward.
#include "trainer/model/vit.h"

#include <algorithm>
#include <cmath>

#include "kernels/error.h"
#include "kernels/vit.h"

namespace gradwire {

// Hands out pieces of one allocation. Run once without memory to learn the size, once with it.
class Vit::Bump {
 public:
  explicit Bump(float* base) : base_(base) {}
  float* take(int64_t floats) {
    float* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (floats + 63) / 64 * 64;  // 256-byte aligned
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  float* base_;
  int64_t used_ = 0;
};

// Where backward puts gradients, and whom it tells.
struct Vit::Gradients {
  float* base;
  const ParameterLayout& layout;
  bool accumulate;
  const std::function<void(int)>& ready;

  float* at(int i) const { return base + layout.offsets[static_cast<size_t>(i)]; }
  float beta() const { return accumulate ? 1.0f : 0.0f; }
  void done(std::initializer_list<int> which) const {
    if (!ready) return;
    for (int i : which) ready(i);
  }
};

Vit::Vit(const VitConfig& config, const Stream& stream, ParameterLayout layout, Options options)
    : config_(config),
      stream_(stream),
      parameters_(vit_parameters(config)),
      layout_(std::move(layout)),
      options_(options) {
  check_model(config);
  if (options_.max_batch < 1) throw BadInput("Vit: max_batch is " + std::to_string(options_.max_batch));
  if (layout_.offsets.size() != parameters_.size()) {
    throw Error("Vit: a layout of " + std::to_string(layout_.offsets.size()) + " tensors for " +
                std::to_string(parameters_.size()) + " parameters");
  }
  find_parameters();
  weights_ = options_.weights ? options_.weights : make_buffer<float>(stream_.device(), layout_.elements);
  if (weights_.bytes() < static_cast<size_t>(layout_.elements) * sizeof(float)) {
    throw Error("Vit: the shared weights are too small");
  }
  a_.layers.resize(static_cast<size_t>(config_.depth));
  Bump measure(nullptr);
  lay_out(measure);
  arena_ = make_buffer<float>(stream_.device(), measure.used());
  Bump place(arena_.as<float>());
  lay_out(place);
}

void Vit::find_parameters() {
  auto find = [&](const std::string& name) {
    auto at =
        std::find_if(parameters_.begin(), parameters_.end(), [&](const auto& p) { return p.name == name; });
    if (at == parameters_.end()) throw Error("Vit: no parameter named " + name);
    return static_cast<int>(at - parameters_.begin());
  };
  index_ = {.head_bias = find("heads.head.bias"),
            .head_weight = find("heads.head.weight"),
            .ln_weight = find("encoder.ln.weight"),
            .ln_bias = find("encoder.ln.bias"),
            .position = find("encoder.pos_embedding"),
            .class_token = find("class_token"),
            .conv_bias = find("conv_proj.bias"),
            .conv_weight = find("conv_proj.weight"),
            .layers = {}};
  for (int32_t layer = 0; layer < config_.depth; ++layer) {
    const std::string at = "encoder.layers.encoder_layer_" + std::to_string(layer) + ".";
    index_.layers.push_back({.mlp3_bias = find(at + "mlp.3.bias"),
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
}

void Vit::lay_out(Bump& bump) {
  const int64_t b = options_.max_batch, t = config_.tokens(), c = config_.width, f = config_.mlp;
  const int64_t rows = b * t, attention = b * config_.heads * t * padded_tokens();
  auto take = [&](int64_t floats) { return bump.take(floats); };

  a_.patches = take(b * (t - 1) * patch_elements());
  for (size_t layer = 0; layer < a_.layers.size(); ++layer) {
    LayerActivations& l = a_.layers[layer];
    if (layer > 0 && !options_.training) {
      l = a_.layers[0];  // nothing is kept for backward; a layer's input is dead before its output is written
      continue;
    }
    l.x = take(rows * c);
    l.ln1 = take(rows * c);
    l.mean1 = take(rows);
    l.rstd1 = take(rows);
    l.q = take(rows * c);
    l.k = take(rows * c);
    l.v = take(rows * c);
    l.attention = take(attention);
    l.merged = take(rows * c);
    l.x_mid = take(rows * c);
    l.ln2 = take(rows * c);
    l.mean2 = take(rows);
    l.rstd2 = take(rows);
    l.pre = take(rows * f);
    l.gelu = take(rows * f);
  }
  a_.x_last = options_.training ? take(rows * c) : a_.layers[0].x;
  a_.features = take(b * c);
  a_.mean = take(b);
  a_.rstd = take(b);
  a_.logits = take(b * config_.classes);
  a_.loss_workspace = take(2 * b);
  a_.qkv = take(rows * 3 * c);
  a_.heads_out = take(rows * c);
  if (!options_.training) return;
  a_.dq = take(rows * c);
  a_.dk = take(rows * c);
  a_.dv = take(rows * c);
  a_.d_attention = take(attention);
  a_.dx = take(rows * c);
  a_.d_branch = take(rows * c);
  a_.d_mlp = take(rows * f);
  a_.d_features = take(b * c);
  a_.workspace =
      take(std::max({layer_norm_backward_workspace(rows, c), column_sum_workspace(rows, 3 * c),
                     column_sum_workspace(rows, f), column_sum_workspace(rows, c),
                     layer_norm_backward_workspace(b, c), column_sum_workspace(b, config_.classes)}));
}

void Vit::load(std::span<const float> values) {
  if (static_cast<int64_t>(values.size()) != layout_.elements) {
    throw Error("Vit::load: " + std::to_string(values.size()) + " values for " +
                std::to_string(layout_.elements));
  }
  to_device(stream_, weights_.as<float>(), values);
}

void Vit::product(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const float* a,
                  const float* b, float* c, float beta) const {
  Gemm args;
  args.transpose_a = transpose_a;
  args.transpose_b = transpose_b;
  args.m = m;
  args.n = n;
  args.k = k;
  args.a = a;
  args.lda = transpose_a ? m : k;
  args.b = b;
  args.ldb = transpose_b ? k : n;
  args.c = c;
  args.ldc = n;
  args.beta = beta;
  args.precision = options_.precision;
  gemm(stream_, args);
}

void Vit::attention_product(bool transpose_a, bool transpose_b, int64_t n, int64_t k, const float* a,
                            int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc) const {
  const int64_t t = config_.tokens();
  Gemm args;
  args.transpose_a = transpose_a;
  args.transpose_b = transpose_b;
  args.m = t;
  args.n = n;
  args.k = k;
  args.a = a;
  args.lda = lda;
  args.stride_a = t * lda;
  args.b = b;
  args.ldb = ldb;
  args.stride_b = t * ldb;
  args.c = c;
  args.ldc = ldc;
  args.stride_c = t * ldc;
  args.batch = batch_ * config_.heads;
  args.precision = options_.precision;
  gemm(stream_, args);
}

void Vit::forward(const float* images, int64_t batch) {
  if (batch < 0 || batch > options_.max_batch) {
    throw Error("Vit::forward: " + std::to_string(batch) + " images, made for " +
                std::to_string(options_.max_batch));
  }
  batch_ = batch;
  const int64_t t = config_.tokens(), c = config_.width;
  patchify(stream_, {.images = images,
                     .patches = a_.patches,
                     .batch = batch,
                     .channels = config_.channels,
                     .image = config_.image,
                     .patch = config_.patch});
  // The layer's scratch is free here: it takes the projection.
  product(false, true, batch * (t - 1), c, patch_elements(), a_.patches, weight(index_.conv_weight), a_.qkv);
  assemble_tokens(stream_, {.projected = a_.qkv,
                            .bias = weight(index_.conv_bias),
                            .class_token = weight(index_.class_token),
                            .position = weight(index_.position),
                            .x = a_.layers[0].x,
                            .batch = batch,
                            .tokens = t,
                            .width = c});
  for (size_t layer = 0; layer < a_.layers.size(); ++layer) {
    forward_layer(layer, layer + 1 < a_.layers.size() ? a_.layers[layer + 1].x : a_.x_last);
  }
  bias_residual(stream_, {.y = a_.x_last,
                          .bias = weight(index_.layers.back().mlp3_bias),
                          .residual = a_.layers.back().x_mid,
                          .x = a_.x_last,
                          .rows = batch * t,
                          .width = c});
  // Only the class token reaches the head, so only its rows are normalized.
  layer_norm(stream_, {.x = a_.x_last,
                       .gamma = weight(index_.ln_weight),
                       .beta = weight(index_.ln_bias),
                       .y = a_.features,
                       .mean = a_.mean,
                       .rstd = a_.rstd,
                       .rows = batch,
                       .width = c,
                       .x_stride = t * c});
  product(false, true, batch, config_.classes, c, a_.features, weight(index_.head_weight), a_.logits);
  bias_residual(stream_, {.y = a_.logits,
                          .bias = weight(index_.head_bias),
                          .x = a_.logits,
                          .rows = batch,
                          .width = config_.classes});
}

// Bias and residual of a layer's last product join in the layer norm that follows: on entry of any layer but
// the first, l.x holds the bare product, and the layer before the rest.
void Vit::forward_layer(size_t layer, float* x_out) {
  const LayerActivations& l = a_.layers[layer];
  const LayerIndex& at = index_.layers[layer];
  const int64_t t = config_.tokens(), c = config_.width, f = config_.mlp, rows = batch_ * t;
  const int64_t d = config_.head_dim(), tp = padded_tokens();

  // x_mid = x + out_proj(attention(ln_1(x)))
  const bool joins = layer > 0;
  layer_norm(stream_, {.x = joins ? a_.layers[layer - 1].x_mid : l.x,
                       .gamma = weight(at.ln1_weight),
                       .beta = weight(at.ln1_bias),
                       .y = l.ln1,
                       .mean = l.mean1,
                       .rstd = l.rstd1,
                       .rows = rows,
                       .width = c,
                       .branch = joins ? l.x : nullptr,
                       .branch_bias = joins ? weight(index_.layers[layer - 1].mlp3_bias) : nullptr,
                       .sum = joins ? l.x : nullptr});
  product(false, true, rows, 3 * c, c, l.ln1, weight(at.in_weight), a_.qkv);
  split_heads(stream_, {.qkv = a_.qkv,
                        .bias = weight(at.in_bias),
                        .q = l.q,
                        .k = l.k,
                        .v = l.v,
                        .batch = batch_,
                        .tokens = t,
                        .heads = config_.heads,
                        .head_dim = d});
  attention_product(false, true, t, d, l.q, d, l.k, d, l.attention, tp);
  softmax(stream_, {.x = l.attention,
                    .rows = batch_ * config_.heads * t,
                    .width = t,
                    .ld = tp,
                    .scale = attention_scale()});
  attention_product(false, false, d, t, l.attention, tp, l.v, d, a_.heads_out, d);
  merge_heads(stream_, {.in = a_.heads_out,
                        .out = l.merged,
                        .batch = batch_,
                        .tokens = t,
                        .heads = config_.heads,
                        .head_dim = d});
  product(false, true, rows, c, c, l.merged, weight(at.out_weight), l.x_mid);

  // x_out = x_mid + mlp.3(GELU(mlp.0(ln_2(x_mid))))
  layer_norm(stream_, {.x = l.x,
                       .gamma = weight(at.ln2_weight),
                       .beta = weight(at.ln2_bias),
                       .y = l.ln2,
                       .mean = l.mean2,
                       .rstd = l.rstd2,
                       .rows = rows,
                       .width = c,
                       .branch = l.x_mid,
                       .branch_bias = weight(at.out_bias),
                       .sum = l.x_mid});
  product(false, true, rows, f, c, l.ln2, weight(at.mlp0_weight), l.pre);
  bias_gelu(stream_, {.x = l.pre, .bias = weight(at.mlp0_bias), .y = l.gelu, .rows = rows, .width = f});
  product(false, true, rows, c, f, l.gelu, weight(at.mlp3_weight), x_out);
}

void Vit::evaluate(const int32_t* labels, double* totals) {
  cross_entropy(stream_, {.logits = a_.logits,
                          .labels = labels,
                          .totals = totals,
                          .workspace = a_.loss_workspace,
                          .rows = batch_,
                          .classes = config_.classes});
}

void Vit::backward(const int32_t* labels, double* totals, float grad_scale, float* gradients, bool accumulate,
                   const std::function<void(int)>& ready) {
  if (!options_.training) throw Error("Vit::backward: this model was made for evaluation only");
  const Gradients to{gradients, layout_, accumulate, ready};
  const int64_t t = config_.tokens(), c = config_.width, k = config_.classes;

  cross_entropy(stream_, {.logits = a_.logits,
                          .labels = labels,
                          .d_logits = a_.logits,
                          .totals = totals,
                          .workspace = a_.loss_workspace,
                          .rows = batch_,
                          .classes = k,
                          .grad_scale = grad_scale});
  column_sum(stream_, {.x = a_.logits,
                       .sum = to.at(index_.head_bias),
                       .workspace = a_.workspace,
                       .rows = batch_,
                       .width = k,
                       .accumulate = accumulate});
  to.done({index_.head_bias});
  product(true, false, k, c, batch_, a_.logits, a_.features, to.at(index_.head_weight), to.beta());
  to.done({index_.head_weight});
  product(false, false, batch_, c, k, a_.logits, weight(index_.head_weight), a_.d_features);

  // Rows other than the class token's get no gradient from the head.
  fill_zero(stream_, a_.dx, static_cast<size_t>(batch_ * t * c) * sizeof(float));
  layer_norm_backward(stream_, {.x = a_.x_last,
                                .dy = a_.d_features,
                                .gamma = weight(index_.ln_weight),
                                .mean = a_.mean,
                                .rstd = a_.rstd,
                                .dx = a_.dx,
                                .d_gamma = to.at(index_.ln_weight),
                                .d_beta = to.at(index_.ln_bias),
                                .workspace = a_.workspace,
                                .rows = batch_,
                                .width = c,
                                .x_stride = t * c,
                                .accumulate = accumulate});
  to.done({index_.ln_weight, index_.ln_bias});

  for (size_t layer = a_.layers.size(); layer-- > 0;) backward_layer(layer, to);

  assemble_tokens_backward(stream_, {.dx = a_.dx,
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

// On entry a_.dx holds the gradient by the layer's output, on exit the gradient by its input.
void Vit::backward_layer(size_t layer, const Gradients& to) {
  const LayerActivations& l = a_.layers[layer];
  const LayerIndex& at = index_.layers[layer];
  const int64_t t = config_.tokens(), c = config_.width, f = config_.mlp, rows = batch_ * t;
  const int64_t d = config_.head_dim(), tp = padded_tokens();
  auto bias_gradient = [&](const float* x, int64_t width, int parameter) {
    column_sum(stream_, {.x = x,
                         .sum = to.at(parameter),
                         .workspace = a_.workspace,
                         .rows = rows,
                         .width = width,
                         .accumulate = to.accumulate});
    to.done({parameter});
  };
  // Weight (out, in) of a product y = x W^T: dW = dy^T x.
  auto weight_gradient = [&](int64_t out, int64_t in, const float* dy, const float* x, int parameter) {
    product(true, false, out, in, rows, dy, x, to.at(parameter), to.beta());
    to.done({parameter});
  };

  // The MLP branch.
  bias_gradient(a_.dx, c, at.mlp3_bias);
  weight_gradient(c, f, a_.dx, l.gelu, at.mlp3_weight);
  product(false, false, rows, f, c, a_.dx, weight(at.mlp3_weight), a_.d_mlp);
  bias_gelu_backward(stream_, {.pre = l.pre,
                               .dy = a_.d_mlp,
                               .d_bias = to.at(at.mlp0_bias),
                               .workspace = a_.workspace,
                               .rows = rows,
                               .width = f,
                               .accumulate = to.accumulate});
  to.done({at.mlp0_bias});
  weight_gradient(f, c, a_.d_mlp, l.ln2, at.mlp0_weight);
  product(false, false, rows, c, f, a_.d_mlp, weight(at.mlp0_weight), a_.d_branch);
  layer_norm_backward(stream_, {.x = l.x_mid,
                                .dy = a_.d_branch,
                                .gamma = weight(at.ln2_weight),
                                .mean = l.mean2,
                                .rstd = l.rstd2,
                                .dx = a_.dx,
                                .d_gamma = to.at(at.ln2_weight),
                                .d_beta = to.at(at.ln2_bias),
                                .workspace = a_.workspace,
                                .rows = rows,
                                .width = c,
                                .accumulate_dx = true,
                                .accumulate = to.accumulate});
  to.done({at.ln2_weight, at.ln2_bias});

  // The attention branch.
  bias_gradient(a_.dx, c, at.out_bias);
  weight_gradient(c, c, a_.dx, l.merged, at.out_weight);
  product(false, false, rows, c, c, a_.dx, weight(at.out_weight), a_.d_branch);
  merge_heads(stream_, {.in = a_.d_branch,
                        .out = a_.heads_out,
                        .batch = batch_,
                        .tokens = t,
                        .heads = config_.heads,
                        .head_dim = d,
                        .inverse = true});
  attention_product(true, false, d, t, l.attention, tp, a_.heads_out, d, a_.dv, d);
  attention_product(false, true, t, d, a_.heads_out, d, l.v, d, a_.d_attention, tp);
  softmax_backward(stream_, {.y = l.attention,
                             .dy = a_.d_attention,
                             .rows = batch_ * config_.heads * t,
                             .width = t,
                             .ld = tp,
                             .scale = attention_scale()});
  attention_product(false, false, d, t, a_.d_attention, tp, l.k, d, a_.dq, d);
  attention_product(true, false, d, t, a_.d_attention, tp, l.q, d, a_.dk, d);
  split_heads_backward(stream_, {.dq = a_.dq,
                                 .dk = a_.dk,
                                 .dv = a_.dv,
                                 .d_qkv = a_.qkv,
                                 .batch = batch_,
                                 .tokens = t,
                                 .heads = config_.heads,
                                 .head_dim = d});
  bias_gradient(a_.qkv, 3 * c, at.in_bias);
  weight_gradient(3 * c, c, a_.qkv, l.ln1, at.in_weight);
  product(false, false, rows, c, 3 * c, a_.qkv, weight(at.in_weight), a_.d_branch);
  layer_norm_backward(stream_, {.x = l.x,
                                .dy = a_.d_branch,
                                .gamma = weight(at.ln1_weight),
                                .mean = l.mean1,
                                .rstd = l.rstd1,
                                .dx = a_.dx,
                                .d_gamma = to.at(at.ln1_weight),
                                .d_beta = to.at(at.ln1_bias),
                                .workspace = a_.workspace,
                                .rows = rows,
                                .width = c,
                                .accumulate_dx = true,
                                .accumulate = to.accumulate});
  to.done({at.ln1_weight, at.ln1_bias});
}

}  // namespace gradwire
