// The Vision Transformer of torchvision, forward and backward, written on the ops of kernels/vit.h and
// gemm.h.
//
// One program for host and CUDA: every call below only enqueues on the model's stream. All memory is taken
// once, in the constructor. Deterministic: same input, same bits.
//
// Shapes: B images, T tokens, C width, H heads, D = C / H, F MLP width, K classes; rows = B * T. Attention
// matrices are (B, H, T, Tp) with Tp = T rounded up to 8 floats, so that their rows are aligned for tensor
// cores (50 -> 56, 197 -> 200).
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/device.h"
#include "kernels/gemm.h"
#include "trainer/model/parameters.h"

namespace gradwire {

class Vit {
 public:
  struct Options {
    int64_t max_batch = 1;  // images that fit in one forward
    Precision precision = Precision::fp32;
    bool training = true;  // false: forward only; layers share their activations
    Buffer weights = {};   // those of another Vit with the same layout, to share; empty: its own
  };

  // `layout` says where parameter i (of vit_parameters(config)) begins in the flat buffers.
  Vit(const VitConfig& config, const Stream& stream, ParameterLayout layout, Options options);

  const VitConfig& config() const { return config_; }
  const std::vector<VitParameter>& parameters() const { return parameters_; }
  const ParameterLayout& layout() const { return layout_; }
  // The flat parameter buffer: layout().elements floats. Not initialized by the constructor.
  const Buffer& weights() const { return weights_; }
  // Copies `values` (layout().elements floats, host memory) in and waits.
  void load(std::span<const float> values);

  // images (batch, channels, image, image) in the device's memory -> logits(). 0 <= batch <= max_batch.
  void forward(const float* images, int64_t batch);
  // (batch, K) of the last forward. A backward overwrites them.
  const float* logits() const { return a_.logits; }

  // Cross entropy of the last forward's logits. totals[0] += sum of losses, totals[1] += right answers
  // (doubles in the device's memory); labels (batch).
  void evaluate(const int32_t* labels, double* totals);

  // The same, then the gradient of grad_scale * (sum of losses) by every parameter, written to `gradients` (a
  // flat buffer in layout(); gaps are left alone) or, with `accumulate`, added to it. Calls ready(i) right
  // after enqueuing the op that finishes gradient i, in order of i; `ready` may be empty. Once per forward.
  void backward(const int32_t* labels, double* totals, float grad_scale, float* gradients, bool accumulate,
                const std::function<void(int)>& ready);

  // Device memory held: weights and activations, in bytes.
  int64_t bytes() const { return static_cast<int64_t>(weights_.bytes() + arena_.bytes()); }

 private:
  // Kept from forward for backward, per layer.
  struct LayerActivations {
    float* x;                    // (rows, C) input
    float *ln1, *mean1, *rstd1;  // (rows, C), (rows), (rows)
    float *q, *k, *v;            // (B, H, T, D)
    float* attention;            // (B, H, T, Tp) softmax
    float* merged;               // (rows, C)
    float* x_mid;                // (rows, C) after the attention branch
    float *ln2, *mean2, *rstd2;  // (rows, C), (rows), (rows)
    float *pre, *gelu;           // (rows, F)
  };
  struct Activations {
    float* patches;  // (B, T-1, channels * patch^2)
    std::vector<LayerActivations> layers;
    float* x_last;                  // (rows, C) output of the last layer
    float *features, *mean, *rstd;  // (B, C), (B), (B): the normalized class token
    float* logits;                  // (B, K); backward turns them into their gradients
    float* loss_workspace;          // (2 * B)
    // Scratch of one layer.
    float* qkv;           // (rows, 3C), also its gradient
    float* heads_out;     // (B, H, T, D), also its gradient
    float *dq, *dk, *dv;  // (B, H, T, D)
    float* d_attention;   // (B, H, T, Tp)
    float* dx;            // (rows, C) gradient of the residual stream
    float* d_branch;      // (rows, C)
    float* d_mlp;         // (rows, F)
    float* d_features;    // (B, C)
    float* workspace;     // column sums
  };
  // Where the parameters of one layer stand in parameters_.
  struct LayerIndex {
    int mlp3_bias, mlp3_weight, mlp0_bias, mlp0_weight, ln2_weight, ln2_bias;
    int out_bias, out_weight, in_bias, in_weight, ln1_weight, ln1_bias;
  };
  struct Index {
    int head_bias, head_weight, ln_weight, ln_bias, position, class_token, conv_bias, conv_weight;
    std::vector<LayerIndex> layers;
  };
  class Bump;
  struct Gradients;

  void find_parameters();
  void lay_out(Bump& bump);
  const float* weight(int i) const { return weights_.as<float>() + layout_.offsets[static_cast<size_t>(i)]; }
  void forward_layer(size_t layer, float* x_out);
  void backward_layer(size_t layer, const Gradients& to);
  // C = op(A) op(B) + beta C with dense operands; shapes as in kernels/gemm.h.
  void product(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const float* a,
               const float* b, float* c, float beta = 0.0f) const;
  // One product per image and head; each operand is stored as T rows, ld* floats apart, and C has m = T rows.
  void attention_product(bool transpose_a, bool transpose_b, int64_t n, int64_t k, const float* a,
                         int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc) const;
  int64_t patch_elements() const { return int64_t{config_.channels} * config_.patch * config_.patch; }
  int64_t padded_tokens() const { return (config_.tokens() + 7) / 8 * 8; }
  float attention_scale() const { return 1.0f / std::sqrt(static_cast<float>(config_.head_dim())); }

  VitConfig config_;
  Stream stream_;
  std::vector<VitParameter> parameters_;
  ParameterLayout layout_;
  Options options_;
  Index index_;
  Buffer weights_, arena_;
  Activations a_{};
  int64_t batch_ = 0;  // of the last forward
};

}  // namespace gradwire
