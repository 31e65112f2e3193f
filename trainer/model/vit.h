// torchvision's Vision Transformer, forward and backward, built from the ops of kernels/vit/vit.h and gemm.h.
//
// The same code runs on host and CUDA: every call only enqueues on the model's stream. The constructor
// allocates all memory. Deterministic: same input, same bits.
//
// On CUDA attention is one kernel in forward and one kernel in backward. These kernels do not store the
// attention matrices (kernels/vit/attention.h).
//
// Shapes: B images, T tokens, C width, H heads, D = C / H, F MLP width, K classes; rows = B * T. Without
// fused attention, attention matrices are (B, H, T, Tp) with Tp = T rounded up to a multiple of 8, which
// aligns their rows for tensor cores (50 -> 56, 197 -> 200).
//
// With Precision::bf16 the operands of products are stored as BF16 (docs/training.md): activations, their
// gradients, and a copy of the weights that is updated with the weights. The weights, the residual stream and
// all parameter gradients stay FP32.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "runtime/device/device.h"
#include "trainer/config/config.h"
#include "trainer/model/parameters.h"
#include "trainer/model/vit_passes.h"

namespace gradwire {

class Vit {
 public:
  struct Options {
    int64_t max_batch = 1;  // maximum images in one forward
    Precision precision = Precision::fp32;
    bool training = true;  // if false, the model only runs forward, and layers share their activations
    // If set, the model shares the weights of `share`, which must have the same layout, stream and precision.
    const Vit* share = nullptr;
    EnterBlock enter_block = {};
    // Whether attention is one op in forward and one op in backward, or products and softmax. If empty, the
    // device's default.
    std::optional<bool> fused_attention = {};
    // Whether products compute GELU and its derivative; only for the tanh form. If empty, the device's
    // default.
    std::optional<bool> fused_gelu = {};
    GradientGroups groups = {};  // layers whose weight gradients are computed together
  };

  // Allocates all memory. `layout`: the offset of parameter i of vit_parameters(config) in the flat buffers.
  // All layers must have the same layout, at a constant distance.
  Vit(const VitConfig& config, const Stream& stream, ParameterLayout layout, Options options);

  const VitConfig& config() const { return config_; }
  const std::vector<VitParameter>& parameters() const { return parameters_; }
  const ParameterLayout& layout() const { return layout_; }
  // Returns the flat parameter buffer: layout().elements floats. The constructor does not initialize it.
  const Buffer& weights() const { return weights_; }
  // Copies `values` (layout().elements floats in host memory) into weights(). Blocks until done.
  void load(std::span<const float> values);
  // Returns the BF16 copy of the weights, layout().elements values; null unless the precision is bf16. After
  // writing to weights() without load(), also write the copy or call round_weights().
  Bf16* rounded_weights() const { return rounded_.as<Bf16>(); }
  void round_weights();

  // Computes logits() from `images`: (batch, channels, image, image) in device memory. 0 <= batch <=
  // max_batch.
  void forward(const float* images, int64_t batch) { passes_->forward(images, batch); }
  // Returns the logits (batch, K) of the last forward. A backward may overwrite them.
  const float* logits() const { return passes_->logits(); }

  // Adds to totals[0] the sum of the cross-entropy losses of the last forward's logits, and to totals[1] the
  // number of correct answers. `totals`: doubles in device memory. `labels`: (batch).
  void evaluate(const int32_t* labels, double* totals) { passes_->evaluate(labels, totals); }

  // Computes the totals of evaluate(), and the gradient of grad_scale * (sum of losses) with respect to every
  // parameter. Overwrites `totals` and `gradients` or, with `accumulate`, adds to them. `gradients` is a flat
  // buffer in layout(); gaps are unchanged. Calls ready(i) right after enqueuing the op
  // that finishes gradient i or later, in order of i; `ready` may be empty. Call once per forward.
  void backward(const int32_t* labels, double* totals, float grad_scale, float* gradients, bool accumulate,
                const std::function<void(int)>& ready) {
    passes_->backward(labels, totals, grad_scale, gradients, accumulate, ready);
  }

  int64_t activation_bytes() const { return passes_->bytes(); }
  // Returns the device memory of weights and activations, in bytes.
  int64_t bytes() const {
    return static_cast<int64_t>(weights_.bytes() + rounded_.bytes()) + passes_->bytes();
  }

 private:
  VitConfig config_;
  Stream stream_;
  std::vector<VitParameter> parameters_;
  ParameterLayout layout_;
  Buffer weights_, rounded_;
  std::unique_ptr<VitPasses> passes_;
};

// FLOPs of a training step, for the log's TFLOP/s.

// Returns the FLOPs of the matrix products in one image's forward and backward pass; a multiply-add counts as
// two. Backward needs two products for each product of forward: for the gradients with respect to the weight
// (or right operand) and to the input. The model computes no gradient with respect to the pixels. The padding
// of attention matrices is not counted.
double training_flops_per_image(const VitConfig& config);

// The index of each of the model's parameters in the list of vit_parameters().

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
