// The forward and backward pass, for product operands of type S. This file declares the activations and
// products that both passes share. vit_passes.cpp lays out the activations; vit_forward.cpp and
// vit_backward.cpp implement the passes.
#pragma once

#include <cmath>
#include <functional>
#include <initializer_list>
#include <type_traits>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "kernels/vit/elementwise.h"
#include "runtime/device/device.h"
#include "trainer/model/vit.h"
#include "trainer/model/vit_passes.h"

namespace gradwire {

// The buffer for backward's gradients, and the callback for finished gradients. Gradients are reported in
// order: flush() reports deferred gradients, and all gradients that follow a deferred gradient.
class GradientOutput {
 public:
  const bool accumulate;
  // If true, ops leave their sums partial, and flush() combines the sums of several ops in one launch.
  bool defer_sums = false;

  GradientOutput(float* base, const ParameterLayout& layout, bool accumulate_,
                 const std::function<void(int)>& ready)
      : accumulate(accumulate_), base_(base), layout_(layout), ready_(ready) {}

  float* at(int i) const { return base_ + layout_.offsets[static_cast<size_t>(i)]; }
  float beta() const { return accumulate ? 1.0f : 0.0f; }
  // Reports gradients whose ops are enqueued.
  void report(std::initializer_list<int> finished) {
    for (int i : finished) {
      if (partial_count_ > 0 || !deferred_.empty()) {
        deferred_.push_back(i);
      } else if (ready_) {
        ready_(i);
      }
    }
  }
  // Reports gradients that an op sums up. `sums`: partial if defer_sums is set.
  void report(const PartialSums& sums, std::initializer_list<int> finished) {
    if (defer_sums) add_partial(sums);
    report(finished);
  }
  void add_partial(const PartialSums& sums) { partial_.of[partial_count_++] = sums; }
  // Leaves gradient i to flush(). The gradient's op must be enqueued before flush().
  void defer(int i) { deferred_.push_back(i); }
  void flush(const Stream& stream) {
    if (partial_count_ > 0) combine_sums(stream, partial_);
    partial_ = {};
    partial_count_ = 0;
    if (ready_) {
      for (int i : deferred_) ready_(i);
    }
    deferred_.clear();
  }

 private:
  float* base_;
  const ParameterLayout& layout_;
  const std::function<void(int)>& ready_;
  CombineSums partial_ = {};
  size_t partial_count_ = 0;
  std::vector<int> deferred_;
};

class Arena;

// Memory for each layer of a group.
template <typename T>
struct PerSlot {
  T* base = nullptr;
  int64_t pitch = 0;
  T* of(int64_t slot) const { return base + slot * pitch; }
};

// Layers top, top - 1, ... whose weight gradients are computed together.
struct LayerGroup {
  int64_t top, count;
  int64_t layer(int64_t slot) const { return top - slot; }
};

template <typename S>
class TypedVitPasses final : public VitPasses {
 public:
  TypedVitPasses(const VitConfig& config, const Stream& stream, const std::vector<VitParameter>& parameters,
                 const ParameterLayout& layout, const VitPassesOptions& options);

  void forward(const float* images, int64_t batch) override;
  const float* logits() const override { return a_.logits; }
  void evaluate(const int32_t* labels, double* totals) override;
  void backward(const int32_t* labels, double* totals, float grad_scale, float* gradients, bool accumulate,
                const std::function<void(int)>& ready) override;
  int64_t bytes() const override { return static_cast<int64_t>(arena_.bytes()); }

 private:
  static constexpr bool kInPlace = std::is_same_v<S, float>;
  // The activations of a layer that forward stores for backward.
  struct LayerActivations {
    float* x;              // (rows, C) input
    S* ln1;                // (rows, C)
    float *mean1, *rstd1;  // (rows)
    // Used with fused_attention:
    S* qkv;             // (rows, 3C) with the bias; backward overwrites qkv with its gradient
    float* statistics;  // (B, H, T, 2)
    // Used without fused_attention:
    S *q, *k, *v;  // (B, H, T, D)
    S* attention;  // (B, H, T, Tp) softmax
    // Used in both cases:
    S* merged;             // (rows, C)
    float* x_mid;          // (rows, C) after the attention branch
    S* ln2;                // (rows, C)
    float *mean2, *rstd2;  // (rows)
    S *pre, *gelu;         // (rows, F)
    S* d_pre;  // (rows, F) in place of pre; with fused_gelu, in place of the pre of the layer above
  };
  struct Activations {
    S* patches;  // (B, T-1, channels * patch^2)
    std::vector<LayerActivations> layers;
    float* x_last;          // (rows, C) output of the last layer
    S* features;            // (B, C) the normalized class token
    float *mean, *rstd;     // (B)
    float* logits;          // (B, K)
    S* d_logits;            // (B, K), in place of the logits if S is float
    float* loss_workspace;  // (2 * B)
    // Scratch memory, shared by the layers.
    S* qkv;            // (rows, 3C); also the gradient of the embedding's product
    PerSlot<S> d_qkv;  // (rows, 3C); only without fused_attention
    S* heads_out;     // (B, H, T, D), also its gradient; used without fused_attention, like dq to d_attention
    S *dq, *dk, *dv;  // (B, H, T, D)
    S* d_attention;   // (B, H, T, Tp)
    float* dx;        // (rows, C) gradient of the residual stream
    // dx as an operand of products, after the MLP and after the attention branch. Null if S is float
    // (kInPlace) and layers are not grouped: dx is then the operand.
    PerSlot<S> dx_mlp, dx_attention;  // (rows, C)
    S* d_branch;                      // (rows, C)
    S* d_gelu;                        // (rows, F); with fused_gelu the first layer's pre
    S* d_features;                    // (B, C)
    // Partial sums of ops whose second stage is one launch per group. Separate memory for each layer.
    PerSlot<float> mlp0_sums, ln2_sums, in_sums, ln1_sums;
    float *token_sums, *head_bias_sums, *head_norm_sums;
    // The next two buffers are unused if S is float (kInPlace): see branch_of() and scores_of().
    S* branch;      // (rows, C) a residual branch before the addition
    float* scores;  // (B, H, T, Tp) before softmax
  };

  void lay_out(Arena& arena);
  void lay_out_layers(Arena& arena);
  void lay_out_backward(Arena& arena);
  size_t offset(int i) const { return static_cast<size_t>(layout_.offsets[static_cast<size_t>(i)]); }
  const float* weight(int i) const { return options_.weights.as<float>() + offset(i); }
  // Returns a weight as an operand of products.
  const S* operand(int i) const {
    if constexpr (kInPlace)
      return weight(i);
    else
      return options_.rounded_weights.as<S>() + offset(i);
  }
  // Returns the buffer for a residual branch. The branch is later added to the residual stream, whose result
  // is `sum`.
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
  // Returns dx as an operand of products. `kept`: the copy in a slot, or null.
  const S* dx_operand(const S* kept) const {
    if constexpr (kInPlace)
      return kept != nullptr ? kept : a_.dx;
    else
      return kept;
  }
  S* d_qkv(const LayerActivations& l, int64_t slot) const {
    return options_.fused_attention ? l.qkv : a_.d_qkv.of(slot);
  }
  // Returns a layer's block. Blocks count from the head (vit_blocks()).
  int block_of(size_t layer) const { return static_cast<int>(a_.layers.size() - layer); }
  void enter_block(int block) const {
    if (options_.enter_block) options_.enter_block(block);
  }
  void forward_layer(size_t layer, S* branch_out);
  void forward_attention(size_t layer);  // l.ln1 -> l.merged
  void backward_head(const int32_t* labels, double* totals, float grad_scale, GradientOutput& to);
  void backward_embedding(GradientOutput& to);
  void clear_dx() const;
  void backward_layer(const LayerGroup& group, int64_t slot, GradientOutput& to);
  // Computes l.d_pre and the gradient of mlp0_bias from dx_mlp.
  void backward_gelu(const LayerGroup& group, int64_t slot, GradientOutput& to);
  // Computes d_qkv() and the gradient of in_bias from a_.d_branch.
  void backward_attention(size_t layer, int64_t slot, GradientOutput& to);
  // Computes the gradient dW = dy^T x of a layer's weight (out, in) in a product y = x W^T. The group's last
  // layer computes the gradients of all layers of the group. dy_of and x_of return the operands in a slot.
  template <typename Dy, typename X>
  void weight_gradient(const LayerGroup& group, int64_t slot, int VitLayerIndex::*weight, int64_t out,
                       int64_t in, const Dy& dy_of, const X& x_of, GradientOutput& to) const;
  // Returns the arguments of C = op(A) op(B) + beta C with dense operands. Shapes as in kernels/gemm/gemm.h.
  template <typename Out>
  void product(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const S* a, const S* b,
               Out* c, float beta = 0.0f, const Out* bias = nullptr) const {
    gemm(stream_, dense(transpose_a, transpose_b, m, n, k, a, b, c, beta, bias));
  }
  template <typename Out>
  Gemm dense(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const S* a, const S* b,
             Out* c, float beta, const Out* bias = nullptr) const;
  // Enqueues one product per image and head. Operands have T rows, ld* elements apart; C has m = T rows.
  template <typename Out>
  void attention_product(bool transpose_a, bool transpose_b, int64_t n, int64_t k, const S* a, int64_t lda,
                         const S* b, int64_t ldb, Out* c, int64_t ldc) const;
  int64_t patch_elements() const { return int64_t{config_.channels} * config_.patch * config_.patch; }
  // Returns the elements of attention scores (B, H, T, Tp), which fused attention does not store.
  int64_t score_elements() const {
    return options_.fused_attention ? 0
                                    : options_.max_batch * config_.heads * config_.tokens() * padded_tokens();
  }
  int64_t padded_tokens() const { return (config_.tokens() + 7) / 8 * 8; }
  float attention_scale() const { return 1.0f / std::sqrt(static_cast<float>(config_.head_dim())); }

  const VitConfig config_;
  const Stream stream_;
  const ParameterLayout layout_;
  const VitPassesOptions options_;
  const VitIndex index_;
  const int64_t group_layers_;  // maximum layers in a group
  Buffer arena_;
  Activations a_{};
  int64_t batch_ = 0;  // images in the last forward
};

template <typename S>
template <typename Out>
Gemm TypedVitPasses<S>::dense(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const S* a,
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
  // For FP32 operands, on CUDA; the type of BF16 operands determines the precision.
  args.precision = options_.precision == Precision::tf32 ? Precision::tf32 : Precision::fp32;
  return args;
}

template <typename S>
template <typename Out>
void TypedVitPasses<S>::attention_product(bool transpose_a, bool transpose_b, int64_t n, int64_t k,
                                          const S* a, int64_t lda, const S* b, int64_t ldb, Out* c,
                                          int64_t ldc) const {
  const int64_t t = config_.tokens();
  Gemm args = dense(transpose_a, transpose_b, t, n, k, a, b, c, 0.0f);
  args.lda = lda;
  args.stride_a = t * lda;
  args.ldb = ldb;
  args.stride_b = t * ldb;
  args.ldc = ldc;
  args.stride_c = t * ldc;
  args.batch = batch_ * config_.heads;
  gemm(stream_, args);
}

}  // namespace gradwire
