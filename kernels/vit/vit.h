// Everything in a ViT's forward and backward pass that is not a matrix product. Shapes: B images, T tokens
// (patches + 1 class token), C width, H heads, D = C / H, F MLP width, K classes. All arrays are dense and
// row-major unless a leading dimension is given. Backward ops *overwrite* parameter gradients unless
// `accumulate` says otherwise. Reductions over rows run in a fixed order: deterministic, no float atomics.
// Limit everywhere: memory bandwidth.
//
// S is how the operands of matrix products are stored: float, or Bf16 (docs/precision.md). What only these
// ops read and write is float: the residual stream and its gradient, scores before softmax, statistics,
// parameters and their gradients. All arithmetic is FP32, and rounded once, when an S is stored. Where "in
// place" is said of arrays of two types, it holds for S = float. Bytes per element are given for float, then
// for Bf16.
#pragma once

#include <cstdint>

#include "kernels/op.h"

namespace gradwire {

// patches(b, i, ch*p*p + y*p + x) = images(b, ch, (i / grid)*p + y, (i % grid)*p + x): the operand of the
// patch convolution as a product. 8 or 6 B per pixel. Image pixels beyond grid * patch are not used.
template <typename S = float>
struct Patchify {
  const float* images = nullptr;  // (B, channels, image, image)
  S* patches = nullptr;           // (B, grid * grid, channels * patch * patch), grid = image / patch
  int64_t batch = 0;
  int32_t channels = 0, image = 0, patch = 0;
};
GW_TYPED_SIDES(patchify, Patchify)
template <typename S = float>
void patchify(const Stream& stream, const Patchify<S>& args) {
  detail::dispatch(stream, args, host::patchify<S>, GW_CUDA_SIDE(patchify<S>), "patchify");
}

// x(b, 0) = class_token + position(0);  x(b, 1 + i) = projected(b, i) + bias + position(1 + i).
// 8 or 6 B per element.
template <typename S = float>
struct AssembleTokens {
  const S* projected = nullptr;        // (B, T-1, C) patch projection without bias
  const float* bias = nullptr;         // (C)
  const float* class_token = nullptr;  // (C)
  const float* position = nullptr;     // (T, C)
  float* x = nullptr;                  // (B, T, C) out
  int64_t batch = 0, tokens = 0, width = 0;
};
GW_TYPED_SIDES(assemble_tokens, AssembleTokens)
template <typename S = float>
void assemble_tokens(const Stream& stream, const AssembleTokens<S>& args) {
  detail::dispatch(stream, args, host::assemble_tokens<S>, GW_CUDA_SIDE(assemble_tokens<S>),
                   "assemble_tokens");
}

// From dx (B, T, C): d_projected (B, T-1, C) = dx without row 0 of each image; d_position (T, C),
// d_class_token (C) and d_bias (C) are sums over the batch (and over patches for d_bias). 8 or 6 B per
// element.
template <typename S = float>
struct AssembleTokensBackward {
  const float* dx = nullptr;
  S* d_projected = nullptr;
  float* d_bias = nullptr;
  float* d_class_token = nullptr;
  float* d_position = nullptr;
  int64_t batch = 0, tokens = 0, width = 0;
  bool accumulate = false;  // parameter gradients only
};
GW_TYPED_SIDES(assemble_tokens_backward, AssembleTokensBackward)
template <typename S = float>
void assemble_tokens_backward(const Stream& stream, const AssembleTokensBackward<S>& args) {
  detail::dispatch(stream, args, host::assemble_tokens_backward<S>, GW_CUDA_SIDE(assemble_tokens_backward<S>),
                   "assemble_tokens_backward");
}

// y = (x - mean) * rstd * gamma + beta per row, biased variance, rstd = 1 / sqrt(var + eps). 8 or 6 B per
// element.
//
// With `branch`, a residual branch joins on the way: sum = x + (branch + branch_bias) is stored, and is what
// is normalized. 16 or 12 B per element, 4 fewer than bias_residual followed by this; the same bits.
template <typename S = float>
struct LayerNorm {
  const float* x = nullptr;      // (rows, C)
  const float* gamma = nullptr;  // (C)
  const float* beta = nullptr;   // (C)
  S* y = nullptr;                // (rows, C)
  float* mean = nullptr;         // (rows) out, for backward
  float* rstd = nullptr;         // (rows) out, for backward
  int64_t rows = 0, width = 0;
  int64_t x_stride = 0;  // distance between rows of x; 0 means width (the head normalizes every T-th row)
  float eps = 1e-6f;
  const S* branch = nullptr;           // (rows, C) a product without its bias, or null
  const float* branch_bias = nullptr;  // (C); with a branch only
  float* sum = nullptr;                // (rows, C) out; with a branch only; may be x (unstrided) or branch
};
GW_TYPED_SIDES(layer_norm, LayerNorm)
template <typename S = float>
void layer_norm(const Stream& stream, const LayerNorm<S>& args) {
  detail::dispatch(stream, args, host::layer_norm<S>, GW_CUDA_SIDE(layer_norm<S>), "layer_norm");
}

// dx (+)= gradient by x; d_gamma, d_beta = sums over rows. 12 or 10 B per element, 4 more when accumulating
// into dx, 2 more with dx_rounded.
template <typename S = float>
struct LayerNormBackward {
  const float* x = nullptr;
  const S* dy = nullptr;
  const float* gamma = nullptr;
  const float* mean = nullptr;
  const float* rstd = nullptr;
  float* dx = nullptr;
  S* dx_rounded =
      nullptr;  // as dx, strides included: what the products behind read; null when they read dx itself
  float* d_gamma = nullptr;
  float* d_beta = nullptr;
  float* workspace = nullptr;  // layer_norm_backward_workspace(rows, width) floats
  int64_t rows = 0, width = 0;
  int64_t x_stride = 0;        // of x and dx; 0 means width
  bool accumulate_dx = false;  // residual branch: dx += instead of dx =
  bool accumulate = false;     // parameter gradients
};
GW_TYPED_SIDES(layer_norm_backward, LayerNormBackward)
template <typename S = float>
void layer_norm_backward(const Stream& stream, const LayerNormBackward<S>& args) {
  detail::dispatch(stream, args, host::layer_norm_backward<S>, GW_CUDA_SIDE(layer_norm_backward<S>),
                   "layer_norm_backward");
}
int64_t layer_norm_backward_workspace(int64_t rows, int64_t width);

// Each row of y (rows, ld) becomes softmax(scale * row of x) over its first `width` entries; entries between
// width and ld become 0, so that padded products see nothing. y may be x. 8 or 6 B per element.
template <typename S = float>
struct Softmax {
  float* x = nullptr;  // (rows, ld) scores; what they are afterwards, if not y, is left open
  S* y = nullptr;      // (rows, ld)
  int64_t rows = 0, width = 0, ld = 0;
  float scale = 1.0f;
};
GW_TYPED_SIDES(softmax, Softmax)
template <typename S = float>
void softmax(const Stream& stream, const Softmax<S>& args) {
  detail::dispatch(stream, args, host::softmax<S>, GW_CUDA_SIDE(softmax<S>), "softmax");
}

// dx = scale * y * (dy - sum(dy * y)), in place over dy; padding becomes 0. 12 or 6 B per element.
template <typename S = float>
struct SoftmaxBackward {
  const S* y = nullptr;  // (rows, ld) what softmax returned
  S* dy = nullptr;       // (rows, ld) in: dy, out: dx
  int64_t rows = 0, width = 0, ld = 0;
  float scale = 1.0f;
};
GW_TYPED_SIDES(softmax_backward, SoftmaxBackward)
template <typename S = float>
void softmax_backward(const Stream& stream, const SoftmaxBackward<S>& args) {
  detail::dispatch(stream, args, host::softmax_backward<S>, GW_CUDA_SIDE(softmax_backward<S>),
                   "softmax_backward");
}

// pre = x + bias (in place in x); y = GELU(pre) = pre * Phi(pre), exact with erf. 12 or 6 B per element.
// Without a bias x is only read: 8 or 4 B.
template <typename S = float>
struct BiasGelu {
  S* x = nullptr;               // (rows, F) in: product without bias, out: pre-activation, kept for backward
  const float* bias = nullptr;  // (F), or null: x is the pre-activation already
  S* y = nullptr;               // (rows, F)
  int64_t rows = 0, width = 0;
};
GW_TYPED_SIDES(bias_gelu, BiasGelu)
template <typename S = float>
void bias_gelu(const Stream& stream, const BiasGelu<S>& args) {
  detail::dispatch(stream, args, host::bias_gelu<S>, GW_CUDA_SIDE(bias_gelu<S>), "bias_gelu");
}

// dy (rows, F) in place becomes dy * GELU'(pre); d_bias = its sum over rows, before rounding. 12 or 6 B per
// element.
template <typename S = float>
struct BiasGeluBackward {
  const S* pre = nullptr;
  S* dy = nullptr;
  float* d_bias = nullptr;
  float* workspace = nullptr;  // column_sum_workspace(rows, width) floats
  int64_t rows = 0, width = 0;
  bool accumulate = false;
};
GW_TYPED_SIDES(bias_gelu_backward, BiasGeluBackward)
template <typename S = float>
void bias_gelu_backward(const Stream& stream, const BiasGeluBackward<S>& args) {
  detail::dispatch(stream, args, host::bias_gelu_backward<S>, GW_CUDA_SIDE(bias_gelu_backward<S>),
                   "bias_gelu_backward");
}

// x (rows, C) += y + bias: a residual branch and the bias of the product before it, in one pass. 12 or
// 10 B per element. With residual == null: x = y + bias; y may be x (plain bias).
template <typename S = float>
struct BiasResidual {
  const S* y = nullptr;             // (rows, C)
  const float* bias = nullptr;      // (C)
  const float* residual = nullptr;  // (rows, C) or null
  float* x = nullptr;               // (rows, C) out; may equal residual or y
  int64_t rows = 0, width = 0;
};
GW_TYPED_SIDES(bias_residual, BiasResidual)
template <typename S = float>
void bias_residual(const Stream& stream, const BiasResidual<S>& args) {
  detail::dispatch(stream, args, host::bias_residual<S>, GW_CUDA_SIDE(bias_residual<S>), "bias_residual");
}

// sum (C) = column sums of x (rows, C): a bias gradient. 4 or 2 B per element.
template <typename S = float>
struct ColumnSum {
  const S* x = nullptr;
  float* sum = nullptr;
  float* workspace = nullptr;  // column_sum_workspace(rows, width) floats
  int64_t rows = 0, width = 0;
  bool accumulate = false;
};
GW_TYPED_SIDES(column_sum, ColumnSum)
template <typename S = float>
void column_sum(const Stream& stream, const ColumnSum<S>& args) {
  detail::dispatch(stream, args, host::column_sum<S>, GW_CUDA_SIDE(column_sum<S>), "column_sum");
}
int64_t column_sum_workspace(int64_t rows, int64_t width);

// qkv (B, T, 3C) + bias (3C) -> q, k, v, each (B, H, T, D). 24 or 12 B per (b, t, c).
template <typename S = float>
struct SplitHeads {
  const S* qkv = nullptr;
  const float* bias = nullptr;  // null: none
  S* q = nullptr;
  S* k = nullptr;
  S* v = nullptr;
  int64_t batch = 0, tokens = 0, heads = 0, head_dim = 0;
};
GW_TYPED_SIDES(split_heads, SplitHeads)
template <typename S = float>
void split_heads(const Stream& stream, const SplitHeads<S>& args) {
  detail::dispatch(stream, args, host::split_heads<S>, GW_CUDA_SIDE(split_heads<S>), "split_heads");
}

// The inverse for gradients: dq, dk, dv (B, H, T, D) -> d_qkv (B, T, 3C). 24 or 12 B per (b, t, c).
template <typename S = float>
struct SplitHeadsBackward {
  const S* dq = nullptr;
  const S* dk = nullptr;
  const S* dv = nullptr;
  S* d_qkv = nullptr;
  int64_t batch = 0, tokens = 0, heads = 0, head_dim = 0;
};
GW_TYPED_SIDES(split_heads_backward, SplitHeadsBackward)
template <typename S = float>
void split_heads_backward(const Stream& stream, const SplitHeadsBackward<S>& args) {
  detail::dispatch(stream, args, host::split_heads_backward<S>, GW_CUDA_SIDE(split_heads_backward<S>),
                   "split_heads_backward");
}

// (B, H, T, D) -> (B, T, C), or back with `inverse`. 8 or 4 B per element.
template <typename S = float>
struct MergeHeads {
  const S* in = nullptr;
  S* out = nullptr;
  int64_t batch = 0, tokens = 0, heads = 0, head_dim = 0;
  bool inverse = false;
};
GW_TYPED_SIDES(merge_heads, MergeHeads)
template <typename S = float>
void merge_heads(const Stream& stream, const MergeHeads<S>& args) {
  detail::dispatch(stream, args, host::merge_heads<S>, GW_CUDA_SIDE(merge_heads<S>), "merge_heads");
}

// Per row: loss = -log softmax(logits)[label]; d_logits = grad_scale * (softmax - onehot).
// totals[0] += sum of losses over rows, totals[1] += rows whose largest logit (first on ties) is the label;
// the two are doubles in device memory, added to in row order. d_logits may be null (evaluation) or equal
// logits. A label outside 0..classes-1 gives a NaN loss.
template <typename S = float>
struct CrossEntropy {
  const float* logits = nullptr;    // (rows, K)
  const int32_t* labels = nullptr;  // (rows)
  S* d_logits = nullptr;
  double* totals = nullptr;    // (2) in and out
  float* workspace = nullptr;  // (2 * rows) floats
  int64_t rows = 0, classes = 0;
  float grad_scale = 1.0f;  // 1 / rows for the mean
};
GW_TYPED_SIDES(cross_entropy, CrossEntropy)
template <typename S = float>
void cross_entropy(const Stream& stream, const CrossEntropy<S>& args) {
  detail::dispatch(stream, args, host::cross_entropy<S>, GW_CUDA_SIDE(cross_entropy<S>), "cross_entropy");
}

}  // namespace gradwire
