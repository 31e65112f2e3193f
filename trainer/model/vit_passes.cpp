// The forward and backward pass, in reading order: set-up, forward, one layer's forward, backward, one
// layer's backward. Written once for both types in which operands of products are stored (S).
#include "trainer/model/vit_passes.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels/gemm/gemm.h"
#include "kernels/vit/vit.h"
#include "runtime/error.h"
#include "trainer/model/vit_index.h"

namespace gradwire {
namespace {

// Hands out pieces of one allocation. Run once without memory to learn the size, once with it.
class Bump {
 public:
  explicit Bump(char* base) : base_(base) {}
  template <typename T>
  T* take(int64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// Where backward puts gradients, and whom it tells.
struct Gradients {
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

template <typename S>
class TypedPasses final : public VitPasses {
 public:
  TypedPasses(const VitConfig& config, const Stream& stream, const std::vector<VitParameter>& parameters,
              const ParameterLayout& layout, const VitPassesOptions& options);

  void forward(const float* images, int64_t batch) override;
  const float* logits() const override { return a_.logits; }
  void evaluate(const int32_t* labels, double* totals) override;
  void backward(const int32_t* labels, double* totals, float grad_scale, float* gradients, bool accumulate,
                const std::function<void(int)>& ready) override;
  int64_t bytes() const override { return static_cast<int64_t>(arena_.bytes()); }

 private:
  static constexpr bool kInPlace = std::is_same_v<S, float>;
  // Kept from forward for backward, per layer.
  struct LayerActivations {
    float* x;              // (rows, C) input
    S* ln1;                // (rows, C)
    float *mean1, *rstd1;  // (rows)
    S *q, *k, *v;          // (B, H, T, D)
    S* attention;          // (B, H, T, Tp) softmax
    S* merged;             // (rows, C)
    float* x_mid;          // (rows, C) after the attention branch
    S* ln2;                // (rows, C)
    float *mean2, *rstd2;  // (rows)
    S *pre, *gelu;         // (rows, F)
  };
  struct Activations {
    S* patches;  // (B, T-1, channels * patch^2)
    std::vector<LayerActivations> layers;
    float* x_last;          // (rows, C) output of the last layer
    S* features;            // (B, C) the normalized class token
    float *mean, *rstd;     // (B)
    float* logits;          // (B, K)
    S* d_logits;            // (B, K), in place of the logits where it can be
    float* loss_workspace;  // (2 * B)
    // Scratch of one layer.
    S* qkv;            // (rows, 3C), also its gradient
    S* heads_out;      // (B, H, T, D), also its gradient
    S *dq, *dk, *dv;   // (B, H, T, D)
    S* d_attention;    // (B, H, T, Tp)
    float* dx;         // (rows, C) gradient of the residual stream
    S* d_branch;       // (rows, C)
    S* d_mlp;          // (rows, F)
    S* d_features;     // (B, C)
    float* workspace;  // column sums
    // Where S is float, these three are not needed: what is stored in place of what is said below.
    S* branch;      // (rows, C) a residual branch before it joins
    float* scores;  // (B, H, T, Tp) before softmax
    S* dx_rounded;  // (rows, C) what products read of dx
  };

  void lay_out(Bump& bump);
  size_t offset(int i) const { return static_cast<size_t>(layout_.offsets[static_cast<size_t>(i)]); }
  const float* weight(int i) const { return options_.weights.as<float>() + offset(i); }
  // The same as products read it.
  const S* operand(int i) const {
    if constexpr (kInPlace)
      return weight(i);
    else
      return options_.rounded_weights.as<S>() + offset(i);
  }
  // Where the product goes whose sum with the residual stream goes to `sum`.
  S* branch_of(float* sum) const {
    if constexpr (kInPlace)
      return sum;
    else
      return a_.branch;
  }
  float* scores_of(S* attention) const {
    if constexpr (kInPlace)
      return attention;
    else
      return a_.scores;
  }
  const S* dx_operand() const {
    if constexpr (kInPlace)
      return a_.dx;
    else
      return a_.dx_rounded;
  }
  void forward_layer(size_t layer, S* branch_out);
  void backward_layer(size_t layer, const Gradients& to);
  // C = op(A) op(B) + beta C with dense operands; shapes as in kernels/gemm/gemm.h.
  template <typename Out>
  void product(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const S* a, const S* b,
               Out* c, float beta = 0.0f, const Out* bias = nullptr) const;
  // One product per image and head; each operand is stored as T rows, ld* elements apart, and C has m = T
  // rows.
  template <typename Out>
  void attention_product(bool transpose_a, bool transpose_b, int64_t n, int64_t k, const S* a, int64_t lda,
                         const S* b, int64_t ldb, Out* c, int64_t ldc) const;
  int64_t patch_elements() const { return int64_t{config_.channels} * config_.patch * config_.patch; }
  int64_t padded_tokens() const { return (config_.tokens() + 7) / 8 * 8; }
  float attention_scale() const { return 1.0f / std::sqrt(static_cast<float>(config_.head_dim())); }
  // FP32 operands on CUDA may be rounded to TF32; the type of others says all.
  Precision fp32_products() const {
    return options_.precision == Precision::tf32 ? Precision::tf32 : Precision::fp32;
  }

  const VitConfig config_;
  const Stream stream_;
  const ParameterLayout layout_;
  const VitPassesOptions options_;
  const VitIndex index_;
  Buffer arena_;
  Activations a_{};
  int64_t batch_ = 0;  // of the last forward
};

template <typename S>
TypedPasses<S>::TypedPasses(const VitConfig& config, const Stream& stream,
                            const std::vector<VitParameter>& parameters, const ParameterLayout& layout,
                            const VitPassesOptions& options)
    : config_(config),
      stream_(stream),
      layout_(layout),
      options_(options),
      index_(find_parameters(parameters, config.depth)) {
  a_.layers.resize(static_cast<size_t>(config_.depth));
  Bump measure(nullptr);
  lay_out(measure);
  arena_ = make_buffer<char>(stream_.device(), measure.used());
  Bump place(arena_.as<char>());
  lay_out(place);
}

template <typename S>
void TypedPasses<S>::lay_out(Bump& bump) {
  const int64_t b = options_.max_batch, t = config_.tokens(), c = config_.width, f = config_.mlp;
  const int64_t rows = b * t, attention = b * config_.heads * t * padded_tokens();
  auto take = [&](int64_t count) { return bump.template take<float>(count); };
  auto take_operand = [&](int64_t count) { return bump.template take<S>(count); };

  a_.patches = take_operand(b * (t - 1) * patch_elements());
  for (size_t layer = 0; layer < a_.layers.size(); ++layer) {
    LayerActivations& l = a_.layers[layer];
    if (layer > 0 && !options_.training) {
      l = a_.layers[0];  // nothing is kept for backward; a layer's input is dead before its output is written
      continue;
    }
    l.x = take(rows * c);
    l.ln1 = take_operand(rows * c);
    l.mean1 = take(rows);
    l.rstd1 = take(rows);
    l.q = take_operand(rows * c);
    l.k = take_operand(rows * c);
    l.v = take_operand(rows * c);
    l.attention = take_operand(attention);
    l.merged = take_operand(rows * c);
    l.x_mid = take(rows * c);
    l.ln2 = take_operand(rows * c);
    l.mean2 = take(rows);
    l.rstd2 = take(rows);
    l.pre = take_operand(rows * f);
    l.gelu = take_operand(rows * f);
  }
  a_.x_last = options_.training ? take(rows * c) : a_.layers[0].x;
  a_.features = take_operand(b * c);
  a_.mean = take(b);
  a_.rstd = take(b);
  a_.logits = take(b * config_.classes);
  a_.loss_workspace = take(2 * b);
  a_.qkv = take_operand(rows * 3 * c);
  a_.heads_out = take_operand(rows * c);
  if constexpr (!kInPlace) {
    a_.branch = take_operand(rows * c);
    a_.scores = take(attention);
  }
  if (!options_.training) return;
  if constexpr (kInPlace) {
    a_.d_logits = a_.logits;
  } else {
    a_.d_logits = take_operand(b * config_.classes);
    a_.dx_rounded = take_operand(rows * c);
  }
  a_.dq = take_operand(rows * c);
  a_.dk = take_operand(rows * c);
  a_.dv = take_operand(rows * c);
  a_.d_attention = take_operand(attention);
  a_.dx = take(rows * c);
  a_.d_branch = take_operand(rows * c);
  a_.d_mlp = take_operand(rows * f);
  a_.d_features = take_operand(b * c);
  a_.workspace =
      take(std::max({layer_norm_backward_workspace(rows, c), column_sum_workspace(rows, 3 * c),
                     column_sum_workspace(rows, f), column_sum_workspace(rows, c),
                     layer_norm_backward_workspace(b, c), column_sum_workspace(b, config_.classes)}));
}

template <typename S>
template <typename Out>
void TypedPasses<S>::product(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const S* a,
                             const S* b, Out* c, float beta, const Out* bias) const {
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
  args.bias = bias;
  args.precision = fp32_products();
  gemm(stream_, args);
}

template <typename S>
template <typename Out>
void TypedPasses<S>::attention_product(bool transpose_a, bool transpose_b, int64_t n, int64_t k, const S* a,
                                       int64_t lda, const S* b, int64_t ldb, Out* c, int64_t ldc) const {
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
  args.precision = fp32_products();
  gemm(stream_, args);
}

template <typename S>
void TypedPasses<S>::forward(const float* images, int64_t batch) {
  if (batch < 0 || batch > options_.max_batch) {
    throw Error("Vit::forward: " + std::to_string(batch) + " images, made for " +
                std::to_string(options_.max_batch));
  }
  batch_ = batch;
  const int64_t t = config_.tokens(), c = config_.width;
  patchify<S>(stream_, {.images = images,
                        .patches = a_.patches,
                        .batch = batch,
                        .channels = config_.channels,
                        .image = config_.image,
                        .patch = config_.patch});
  // The layer's scratch is free here: it takes the projection.
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
  bias_residual<S>(stream_, {.y = branch_of(a_.x_last),
                             .bias = weight(index_.layers.back().mlp3_bias),
                             .residual = a_.layers.back().x_mid,
                             .x = a_.x_last,
                             .rows = batch * t,
                             .width = c});
  // Only the class token reaches the head, so only its rows are normalized.
  layer_norm<S>(stream_, {.x = a_.x_last,
                          .gamma = weight(index_.ln_weight),
                          .beta = weight(index_.ln_bias),
                          .y = a_.features,
                          .mean = a_.mean,
                          .rstd = a_.rstd,
                          .rows = batch,
                          .width = c,
                          .x_stride = t * c});
  product(false, true, batch, config_.classes, c, a_.features, operand(index_.head_weight), a_.logits);
  bias_residual<float>(stream_, {.y = a_.logits,
                                 .bias = weight(index_.head_bias),
                                 .x = a_.logits,
                                 .rows = batch,
                                 .width = config_.classes});
}

// Bias and residual of a layer's last product join in the layer norm that follows: on entry of any layer but
// the first, l.x holds the bare product, and the layer before the rest.
template <typename S>
void TypedPasses<S>::forward_layer(size_t layer, S* branch_out) {
  const LayerActivations& l = a_.layers[layer];
  const VitLayerIndex& at = index_.layers[layer];
  const int64_t t = config_.tokens(), c = config_.width, f = config_.mlp, rows = batch_ * t;
  const int64_t d = config_.head_dim(), tp = padded_tokens();

  // x_mid = x + out_proj(attention(ln_1(x)))
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
  product(false, true, rows, 3 * c, c, l.ln1, operand(at.in_weight), a_.qkv);
  split_heads<S>(stream_, {.qkv = a_.qkv,
                           .bias = weight(at.in_bias),
                           .q = l.q,
                           .k = l.k,
                           .v = l.v,
                           .batch = batch_,
                           .tokens = t,
                           .heads = config_.heads,
                           .head_dim = d});
  attention_product(false, true, t, d, l.q, d, l.k, d, scores_of(l.attention), tp);
  softmax<S>(stream_, {.x = scores_of(l.attention),
                       .y = l.attention,
                       .rows = batch_ * config_.heads * t,
                       .width = t,
                       .ld = tp,
                       .scale = attention_scale()});
  attention_product(false, false, d, t, l.attention, tp, l.v, d, a_.heads_out, d);
  merge_heads<S>(stream_, {.in = a_.heads_out,
                           .out = l.merged,
                           .batch = batch_,
                           .tokens = t,
                           .heads = config_.heads,
                           .head_dim = d});
  product(false, true, rows, c, c, l.merged, operand(at.out_weight), branch_of(l.x_mid));

  // x_out = x_mid + mlp.3(GELU(mlp.0(ln_2(x_mid))))
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
  product(false, true, rows, f, c, l.ln2, operand(at.mlp0_weight), l.pre, 0.0f, operand(at.mlp0_bias));
  bias_gelu<S>(stream_, {.x = l.pre, .y = l.gelu, .rows = rows, .width = f});
  product(false, true, rows, c, f, l.gelu, operand(at.mlp3_weight), branch_out);
}

template <typename S>
void TypedPasses<S>::evaluate(const int32_t* labels, double* totals) {
  cross_entropy<float>(stream_, {.logits = a_.logits,
                                 .labels = labels,
                                 .totals = totals,
                                 .workspace = a_.loss_workspace,
                                 .rows = batch_,
                                 .classes = config_.classes});
}

template <typename S>
void TypedPasses<S>::backward(const int32_t* labels, double* totals, float grad_scale, float* gradients,
                              bool accumulate, const std::function<void(int)>& ready) {
  if (!options_.training) throw Error("Vit::backward: this model was made for evaluation only");
  const Gradients to{gradients, layout_, accumulate, ready};
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
                          .workspace = a_.workspace,
                          .rows = batch_,
                          .width = k,
                          .accumulate = accumulate});
  to.done({index_.head_bias});
  product(true, false, k, c, batch_, a_.d_logits, a_.features, to.at(index_.head_weight), to.beta());
  to.done({index_.head_weight});
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
                                   .workspace = a_.workspace,
                                   .rows = batch_,
                                   .width = c,
                                   .x_stride = t * c,
                                   .accumulate = accumulate});
  to.done({index_.ln_weight, index_.ln_bias});

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

// On entry a_.dx holds the gradient by the layer's output, on exit the gradient by its input.
template <typename S>
void TypedPasses<S>::backward_layer(size_t layer, const Gradients& to) {
  const LayerActivations& l = a_.layers[layer];
  const VitLayerIndex& at = index_.layers[layer];
  const int64_t t = config_.tokens(), c = config_.width, f = config_.mlp, rows = batch_ * t;
  const int64_t d = config_.head_dim(), tp = padded_tokens();
  auto bias_gradient = [&](const S* x, int64_t width, int parameter) {
    column_sum<S>(stream_, {.x = x,
                            .sum = to.at(parameter),
                            .workspace = a_.workspace,
                            .rows = rows,
                            .width = width,
                            .accumulate = to.accumulate});
    to.done({parameter});
  };
  // Weight (out, in) of a product y = x W^T: dW = dy^T x.
  auto weight_gradient = [&](int64_t out, int64_t in, const S* dy, const S* x, int parameter) {
    product(true, false, out, in, rows, dy, x, to.at(parameter), to.beta());
    to.done({parameter});
  };

  // The MLP branch.
  bias_gradient(dx_operand(), c, at.mlp3_bias);
  weight_gradient(c, f, dx_operand(), l.gelu, at.mlp3_weight);
  product(false, false, rows, f, c, dx_operand(), operand(at.mlp3_weight), a_.d_mlp);
  bias_gelu_backward<S>(stream_, {.pre = l.pre,
                                  .dy = a_.d_mlp,
                                  .d_bias = to.at(at.mlp0_bias),
                                  .workspace = a_.workspace,
                                  .rows = rows,
                                  .width = f,
                                  .accumulate = to.accumulate});
  to.done({at.mlp0_bias});
  weight_gradient(f, c, a_.d_mlp, l.ln2, at.mlp0_weight);
  product(false, false, rows, c, f, a_.d_mlp, operand(at.mlp0_weight), a_.d_branch);
  layer_norm_backward<S>(stream_, {.x = l.x_mid,
                                   .dy = a_.d_branch,
                                   .gamma = weight(at.ln2_weight),
                                   .mean = l.mean2,
                                   .rstd = l.rstd2,
                                   .dx = a_.dx,
                                   .dx_rounded = a_.dx_rounded,
                                   .d_gamma = to.at(at.ln2_weight),
                                   .d_beta = to.at(at.ln2_bias),
                                   .workspace = a_.workspace,
                                   .rows = rows,
                                   .width = c,
                                   .accumulate_dx = true,
                                   .accumulate = to.accumulate});
  to.done({at.ln2_weight, at.ln2_bias});

  // The attention branch.
  bias_gradient(dx_operand(), c, at.out_bias);
  weight_gradient(c, c, dx_operand(), l.merged, at.out_weight);
  product(false, false, rows, c, c, dx_operand(), operand(at.out_weight), a_.d_branch);
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
  bias_gradient(a_.qkv, 3 * c, at.in_bias);
  weight_gradient(3 * c, c, a_.qkv, l.ln1, at.in_weight);
  product(false, false, rows, c, 3 * c, a_.qkv, operand(at.in_weight), a_.d_branch);
  layer_norm_backward<S>(stream_, {.x = l.x,
                                   .dy = a_.d_branch,
                                   .gamma = weight(at.ln1_weight),
                                   .mean = l.mean1,
                                   .rstd = l.rstd1,
                                   .dx = a_.dx,
                                   .dx_rounded = a_.dx_rounded,
                                   .d_gamma = to.at(at.ln1_weight),
                                   .d_beta = to.at(at.ln1_bias),
                                   .workspace = a_.workspace,
                                   .rows = rows,
                                   .width = c,
                                   .accumulate_dx = true,
                                   .accumulate = to.accumulate});
  to.done({at.ln1_weight, at.ln1_bias});
}

}  // namespace

std::unique_ptr<VitPasses> make_vit_passes(const VitConfig& config, const Stream& stream,
                                           const std::vector<VitParameter>& parameters,
                                           const ParameterLayout& layout, const VitPassesOptions& options) {
  if (options.precision == Precision::bf16) {
    return std::make_unique<TypedPasses<Bf16>>(config, stream, parameters, layout, options);
  }
  return std::make_unique<TypedPasses<float>>(config, stream, parameters, layout, options);
}

}  // namespace gradwire
