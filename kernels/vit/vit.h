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
GW_DECLARE_TYPED_OP(patchify, Patchify)

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
GW_DECLARE_TYPED_OP(assemble_tokens, AssembleTokens)

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
GW_DECLARE_TYPED_OP(assemble_tokens_backward, AssembleTokensBackward)

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
GW_DECLARE_TYPED_OP(layer_norm, LayerNorm)

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
GW_DECLARE_TYPED_OP(layer_norm_backward, LayerNormBackward)
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
GW_DECLARE_TYPED_OP(softmax, Softmax)

// dx = scale * y * (dy - sum(dy * y)), in place over dy; padding becomes 0. 12 or 6 B per element.
template <typename S = float>
struct SoftmaxBackward {
  const S* y = nullptr;  // (rows, ld) what softmax returned
  S* dy = nullptr;       // (rows, ld) in: dy, out: dx
  int64_t rows = 0, width = 0, ld = 0;
  float scale = 1.0f;
};
GW_DECLARE_TYPED_OP(softmax_backward, SoftmaxBackward)

// pre = x + bias (in place in x); y = GELU(pre) = pre * Phi(pre), exact with erf. 12 or 6 B per element.
// Without a bias x is only read: 8 or 4 B.
template <typename S = float>
struct BiasGelu {
  S* x = nullptr;               // (rows, F) in: product without bias, out: pre-activation, kept for backward
  const float* bias = nullptr;  // (F), or null: x is the pre-activation already
  S* y = nullptr;               // (rows, F)
  int64_t rows = 0, width = 0;
};
GW_DECLARE_TYPED_OP(bias_gelu, BiasGelu)

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
GW_DECLARE_TYPED_OP(bias_gelu_backward, BiasGeluBackward)

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
GW_DECLARE_TYPED_OP(bias_residual, BiasResidual)

// sum (C) = column sums of x (rows, C): a bias gradient. 4 or 2 B per element.
template <typename S = float>
struct ColumnSum {
  const S* x = nullptr;
  float* sum = nullptr;
  float* workspace = nullptr;  // column_sum_workspace(rows, width) floats
  int64_t rows = 0, width = 0;
  bool accumulate = false;
};
GW_DECLARE_TYPED_OP(column_sum, ColumnSum)
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
GW_DECLARE_TYPED_OP(split_heads, SplitHeads)

// The inverse for gradients: dq, dk, dv (B, H, T, D) -> d_qkv (B, T, 3C). 24 or 12 B per (b, t, c).
template <typename S = float>
struct SplitHeadsBackward {
  const S* dq = nullptr;
  const S* dk = nullptr;
  const S* dv = nullptr;
  S* d_qkv = nullptr;
  int64_t batch = 0, tokens = 0, heads = 0, head_dim = 0;
};
GW_DECLARE_TYPED_OP(split_heads_backward, SplitHeadsBackward)

// (B, H, T, D) -> (B, T, C), or back with `inverse`. 8 or 4 B per element.
template <typename S = float>
struct MergeHeads {
  const S* in = nullptr;
  S* out = nullptr;
  int64_t batch = 0, tokens = 0, heads = 0, head_dim = 0;
  bool inverse = false;
};
GW_DECLARE_TYPED_OP(merge_heads, MergeHeads)

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
GW_DECLARE_TYPED_OP(cross_entropy, CrossEntropy)

}  // namespace gradwire
