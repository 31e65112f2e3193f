// Cases of the ViT and its products, in ViT-B/32's shapes: 50 tokens, width 768, 12 heads, MLP 3072. `size`
// is the size of the main activation and determines the number of images or rows.
//
// In-place ops run repeatedly on the same memory, so their inputs are chosen such that values neither vanish
// nor explode (denormals would slow down the arithmetic).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "bench/cases/kernel_cases.h"
#include "kernels/gemm/gemm.h"
#include "kernels/vit/vit.h"
#include "kernels/wire/format.h"

namespace gradwire::bench {
namespace {

constexpr int64_t kTokens = 50, kTokensPadded = 56, kWidth = 768, kHeads = 12, kHeadDim = 64, kMlp = 3072;
constexpr int64_t kClasses = 1000;

int64_t rows_of(int64_t size, int64_t width) {
  return std::max<int64_t>(1, size / 4 / width);
}
std::string by(int64_t rows, int64_t width) {
  return fmt::format("{}x{}", rows, width);
}
double times(double bytes, int64_t rows, int64_t width) {
  return bytes * static_cast<double>(rows) * static_cast<double>(width);
}
// A batch of images of kTokens x kWidth floats. A small size has fewer tokens.
struct Tokens {
  int64_t batch, tokens;
  int64_t elements() const { return batch * tokens * kWidth; }
  std::string shape() const { return fmt::format("{}x{}x{}", batch, tokens, kWidth); }
};
Tokens tokens_of(int64_t size) {
  int64_t rows = rows_of(size, kWidth);
  return rows < kTokens ? Tokens{1, std::max<int64_t>(2, rows)} : Tokens{rows / kTokens, kTokens};
}

// Returns operands of products as S: a short pattern, repeated; the same values for every S.
template <typename S>
S* repeated(Arena& arena, int64_t count, const float* pattern, int64_t length) {
  S* out = arena.zeros<S>(count);
  for (int64_t at = 0; at < count; at += length) {
    kBf16->reduce_encode(arena.stream(),
                         {.own = pattern, .wire = out + at, .count = std::min(length, count - at)});
  }
  return out;
}
constexpr int64_t kPattern = 1 << 18;
template <typename S>
S* operands(Arena& arena, int64_t count) {
  const int64_t length = std::min(count, kPattern);
  if constexpr (std::is_same_v<S, float>) {
    return arena.normal(count);
  } else {
    return repeated<S>(arena, count, arena.normal(length), length);
  }
}
template <typename S>
S* operands_of(Arena& arena, int64_t count, float value) {
  const int64_t length = std::min(count, kPattern);
  if constexpr (std::is_same_v<S, float>) {
    return arena.filled(count, value);
  } else {
    return repeated<S>(arena, count, arena.filled(length, value), length);
  }
}
template <typename S>
constexpr double kBytes = sizeof(S);

template <Precision kPrecision, bool kTransposeA, bool kTransposeB, typename S = float>
Problem square_product(Arena& arena, int64_t size) {
  auto n = static_cast<int64_t>(std::sqrt(static_cast<double>(size / 4)));
  Gemm args{.transpose_a = kTransposeA,
            .transpose_b = kTransposeB,
            .m = n,
            .n = n,
            .k = n,
            .a = operands<S>(arena, n * n),
            .lda = n,
            .b = operands<S>(arena, n * n),
            .ldb = n,
            .c = arena.zeros<S>(n * n),
            .ldc = n,
            .precision = kPrecision};
  double m = static_cast<double>(n);
  return {[args](const Stream& s) { gemm(s, args); }, 3 * kBytes<S> * m * m, 2 * m * m * m, by(n, n)};
}

// Returns a product with GELU or the derivative of GELU as epilogue.
template <Epilogue kEpilogue>
Problem gelu_product(Arena& arena, int64_t size) {
  const auto n = static_cast<int64_t>(std::sqrt(static_cast<double>(size / kBytes<Bf16>))) / 8 * 8;
  Gemm args{.transpose_b = kEpilogue == Epilogue::gelu_tanh,
            .m = n,
            .n = n,
            .k = n,
            .a = operands<Bf16>(arena, n * n),
            .lda = n,
            .b = operands<Bf16>(arena, n * n),
            .ldb = n,
            .c = arena.zeros<Bf16>(n * n),
            .ldc = n,
            .epilogue = kEpilogue,
            .aux = operands<Bf16>(arena, n * n)};
  const double m = static_cast<double>(n);
  return {[args](const Stream& s) { gemm(s, args); }, 4 * kBytes<Bf16> * m * m, 2 * m * m * m, by(n, n)};
}

// Returns the product Q K^T of all heads. `size` is the size of the attention matrices in bytes.
Problem attention_product(Arena& arena, int64_t size) {
  int64_t batch = std::max<int64_t>(1, size / 4 / (kTokens * kTokensPadded));
  Gemm args{.transpose_b = true,
            .m = kTokens,
            .n = kTokens,
            .k = kHeadDim,
            .a = arena.normal(batch * kTokens * kHeadDim),
            .lda = kHeadDim,
            .stride_a = kTokens * kHeadDim,
            .b = arena.normal(batch * kTokens * kHeadDim),
            .ldb = kHeadDim,
            .stride_b = kTokens * kHeadDim,
            .c = arena.zeros<float>(batch * kTokens * kTokensPadded),
            .ldc = kTokensPadded,
            .stride_c = kTokens * kTokensPadded,
            .batch = batch};
  double per = kTokens * (2.0 * kHeadDim + kTokens);
  return {[args](const Stream& s) { gemm(s, args); }, 4 * per * static_cast<double>(batch),
          2.0 * kTokens * kTokens * kHeadDim * static_cast<double>(batch),
          fmt::format("{} of {}x{}x{}", batch, kTokens, kTokens, kHeadDim)};
}

Problem patchify_images(Arena& arena, int64_t size) {
  // Small sizes have a smaller image.
  Patchify args{.channels = 3,
                .image = size < 3 * 224 * 224 * 4 ? 16 : 224,
                .patch = size < 3 * 224 * 224 * 4 ? 8 : 32};
  int64_t pixels = int64_t{3} * args.image * args.image;
  args.batch = std::max<int64_t>(1, size / 4 / pixels);
  args.images = arena.normal(args.batch * pixels);
  args.patches = arena.zeros<float>(args.batch * pixels);
  return {[args](const Stream& s) { patchify(s, args); }, times(8, args.batch, pixels), 0,
          fmt::format("{} of {}", args.batch, by(args.image, args.image))};
}

Problem assemble(Arena& arena, int64_t size) {
  Tokens t = tokens_of(size);
  AssembleTokens args{.projected = arena.normal(t.elements()),
                      .bias = arena.normal(kWidth),
                      .class_token = arena.normal(kWidth),
                      .position = arena.normal(t.tokens * kWidth),
                      .x = arena.zeros<float>(t.elements()),
                      .batch = t.batch,
                      .tokens = t.tokens,
                      .width = kWidth};
  return {[args](const Stream& s) { assemble_tokens(s, args); }, 8.0 * static_cast<double>(t.elements()), 0,
          t.shape()};
}

Problem assemble_backward(Arena& arena, int64_t size) {
  Tokens t = tokens_of(size);
  AssembleTokensBackward args{.dx = arena.normal(t.elements()),
                              .d_projected = arena.zeros<float>(t.elements()),
                              .d_bias = arena.zeros<float>(kWidth),
                              .d_class_token = arena.zeros<float>(kWidth),
                              .d_position = arena.zeros<float>(t.tokens * kWidth),
                              .batch = t.batch,
                              .tokens = t.tokens,
                              .width = kWidth};
  return {[args](const Stream& s) { assemble_tokens_backward(s, args); },
          8.0 * static_cast<double>(t.elements()), 0, t.shape()};
}

template <typename S>
Problem norm(Arena& arena, int64_t size) {
  int64_t rows = rows_of(size, kWidth);
  LayerNorm<S> args{.x = arena.normal(rows * kWidth),
                    .gamma = arena.normal(kWidth),
                    .beta = arena.normal(kWidth),
                    .y = arena.zeros<S>(rows * kWidth),
                    .mean = arena.zeros<float>(rows),
                    .rstd = arena.zeros<float>(rows),
                    .rows = rows,
                    .width = kWidth};
  return {[args](const Stream& s) { layer_norm(s, args); }, times(4 + kBytes<S>, rows, kWidth), 0,
          by(rows, kWidth)};
}

template <typename S>
Problem norm_backward(Arena& arena, int64_t size) {
  int64_t rows = rows_of(size, kWidth);
  LayerNormBackward<S> args{.x = arena.normal(rows * kWidth),
                            .dy = operands<S>(arena, rows * kWidth),
                            .gamma = arena.normal(kWidth),
                            .mean = arena.zeros<float>(rows),
                            .rstd = arena.filled(rows, 1.0f),
                            .dx = arena.zeros<float>(rows * kWidth),
                            .d_gamma = arena.zeros<float>(kWidth),
                            .d_beta = arena.zeros<float>(kWidth),
                            .workspace = arena.zeros<float>(layer_norm_backward_workspace(rows, kWidth)),
                            .rows = rows,
                            .width = kWidth};
  return {[args](const Stream& s) { layer_norm_backward(s, args); }, times(8 + kBytes<S>, rows, kWidth), 0,
          by(rows, kWidth)};
}

template <typename S>
Problem softmax_rows(Arena& arena, int64_t size) {
  int64_t rows = rows_of(size, kTokensPadded);
  float* scores = arena.normal(rows * kTokensPadded);
  S* y = arena.zeros<S>(std::is_same_v<S, float> ? 0 : rows * kTokensPadded);
  if constexpr (std::is_same_v<S, float>) y = scores;
  Softmax<S> args{.x = scores, .y = y, .rows = rows, .width = kTokens, .ld = kTokensPadded};
  return {[args](const Stream& s) { softmax(s, args); }, times(4 + kBytes<S>, rows, kTokensPadded), 0,
          by(rows, kTokens)};
}

Problem softmax_rows_backward(Arena& arena, int64_t size) {
  int64_t rows = rows_of(size, kTokensPadded);
  // If every y is 1 / width, and with the scale below, the op only subtracts the mean. The op can therefore
  // be repeated.
  SoftmaxBackward args{.y = arena.filled(rows * kTokensPadded, 1.0f / kTokens),
                       .dy = arena.normal(rows * kTokensPadded),
                       .rows = rows,
                       .width = kTokens,
                       .ld = kTokensPadded,
                       .scale = kTokens};
  return {[args](const Stream& s) { softmax_backward(s, args); }, times(12, rows, kTokensPadded), 0,
          by(rows, kTokens)};
}

template <typename S, Gelu kForm = Gelu::exact>
Problem gelu(Arena& arena, int64_t size) {
  int64_t rows = rows_of(size, kMlp);
  BiasGelu<S> args{.x = operands<S>(arena, rows * kMlp),
                   .bias = arena.zeros<float>(kMlp),
                   .y = arena.zeros<S>(rows * kMlp),
                   .rows = rows,
                   .width = kMlp,
                   .form = kForm};
  return {[args](const Stream& s) { bias_gelu(s, args); }, times(3 * kBytes<S>, rows, kMlp), 0,
          by(rows, kMlp)};
}

template <typename S, Gelu kForm = Gelu::exact>
Problem gelu_backward(Arena& arena, int64_t size) {
  int64_t rows = rows_of(size, kMlp);
  constexpr float kSlopeOne = 0.75179f;  // the slope of GELU is 1 at this value
  S* dy = operands<S>(arena, rows * kMlp);
  BiasGeluBackward<S> args{.pre = operands_of<S>(arena, rows * kMlp, kSlopeOne),
                           .dy = dy,
                           .d_pre = dy,
                           .d_bias = arena.zeros<float>(kMlp),
                           .workspace = arena.zeros<float>(column_sum_workspace(rows, kMlp)),
                           .rows = rows,
                           .width = kMlp,
                           .form = kForm};
  return {[args](const Stream& s) { bias_gelu_backward(s, args); }, times(3 * kBytes<S>, rows, kMlp), 0,
          by(rows, kMlp)};
}

Problem residual_branch(Arena& arena, int64_t size) {
  int64_t rows = rows_of(size, kWidth);
  BiasResidual args{.y = arena.normal(rows * kWidth),
                    .bias = arena.normal(kWidth),
                    .residual = arena.normal(rows * kWidth),
                    .x = arena.zeros<float>(rows * kWidth),
                    .rows = rows,
                    .width = kWidth};
  return {[args](const Stream& s) { bias_residual(s, args); }, times(12, rows, kWidth), 0, by(rows, kWidth)};
}

template <typename S>
Problem bias_gradient(Arena& arena, int64_t size) {
  int64_t rows = rows_of(size, kWidth);
  ColumnSum<S> args{.x = operands<S>(arena, rows * kWidth),
                    .sum = arena.zeros<float>(kWidth),
                    .workspace = arena.zeros<float>(column_sum_workspace(rows, kWidth)),
                    .rows = rows,
                    .width = kWidth};
  return {[args](const Stream& s) { column_sum(s, args); }, times(kBytes<S>, rows, kWidth), 0,
          by(rows, kWidth)};
}

// Returns a combination of three adjacent sums, as in the backward of a layer norm.
Problem combine(Arena& arena, int64_t size) {
  const int64_t count = rows_of(size, 3 * kWidth);
  CombineSums args;
  args.of[0] = {.partial = arena.normal(count * 3 * kWidth),
                .count = count,
                .pitch = 3 * kWidth,
                .width = kWidth,
                .sums = {arena.zeros<float>(kWidth), arena.zeros<float>(kWidth), arena.zeros<float>(kWidth)}};
  return {[args](const Stream& s) { combine_sums(s, args); }, times(4, count, 3 * kWidth), 0,
          by(count, 3 * kWidth)};
}

// Returns a split of qkv into heads. For split, merge and attention, `size` is the size of (B, T, C) in
// bytes; qkv is three times as large.
Problem split(Arena& arena, int64_t size) {
  Tokens t = tokens_of(size);
  SplitHeads args{.qkv = arena.normal(3 * t.elements()),
                  .bias = arena.normal(3 * kWidth),
                  .q = arena.zeros<float>(t.elements()),
                  .k = arena.zeros<float>(t.elements()),
                  .v = arena.zeros<float>(t.elements()),
                  .batch = t.batch,
                  .tokens = t.tokens,
                  .heads = kHeads,
                  .head_dim = kHeadDim};
  return {[args](const Stream& s) { split_heads(s, args); }, 24.0 * static_cast<double>(t.elements()), 0,
          t.shape()};
}

Problem split_backward(Arena& arena, int64_t size) {
  Tokens t = tokens_of(size);
  SplitHeadsBackward args{.dq = arena.normal(t.elements()),
                          .dk = arena.normal(t.elements()),
                          .dv = arena.normal(t.elements()),
                          .d_qkv = arena.zeros<float>(3 * t.elements()),
                          .batch = t.batch,
                          .tokens = t.tokens,
                          .heads = kHeads,
                          .head_dim = kHeadDim};
  return {[args](const Stream& s) { split_heads_backward(s, args); },
          24.0 * static_cast<double>(t.elements()), 0, t.shape()};
}

template <bool kInverse>
Problem merge(Arena& arena, int64_t size) {
  Tokens t = tokens_of(size);
  MergeHeads args{.in = arena.normal(t.elements()),
                  .out = arena.zeros<float>(t.elements()),
                  .batch = t.batch,
                  .tokens = t.tokens,
                  .heads = kHeads,
                  .head_dim = kHeadDim,
                  .inverse = kInverse};
  return {[args](const Stream& s) { merge_heads(s, args); }, 8.0 * static_cast<double>(t.elements()), 0,
          t.shape()};
}

// Returns the sum of T^2 D over all heads: half the operations of a product with the attention matrices.
double attention_flops(const Tokens& t) {
  return static_cast<double>(t.elements()) * static_cast<double>(t.tokens);
}

template <typename S>
Problem attend(Arena& arena, int64_t size) {
  Tokens t = tokens_of(size);
  Attention<S> args{.qkv = operands<S>(arena, 3 * t.elements()),
                    .merged = arena.zeros<S>(t.elements()),
                    .statistics = arena.zeros<float>(2 * t.batch * kHeads * t.tokens),
                    .batch = t.batch,
                    .tokens = t.tokens,
                    .heads = kHeads,
                    .head_dim = kHeadDim};
  return {[args](const Stream& s) { attention(s, args); }, 4 * kBytes<S> * static_cast<double>(t.elements()),
          4 * attention_flops(t), t.shape()};
}

template <typename S>
Problem attend_backward(Arena& arena, int64_t size) {
  Tokens t = tokens_of(size);
  AttentionBackward<S> args{
      .qkv = operands<S>(arena, 3 * t.elements()),
      .merged = arena.zeros<S>(t.elements()),
      .d_merged = operands<S>(arena, t.elements()),
      .statistics = arena.filled(2 * t.batch * kHeads * t.tokens, 1.0f),
      .d_qkv = arena.zeros<S>(3 * t.elements()),
      .d_bias = arena.zeros<float>(3 * kWidth),
      .workspace = arena.zeros<float>(attention_backward_workspace(t.batch, t.tokens, kWidth)),
      .batch = t.batch,
      .tokens = t.tokens,
      .heads = kHeads,
      .head_dim = kHeadDim};
  return {[args](const Stream& s) { attention_backward(s, args); },
          8 * kBytes<S> * static_cast<double>(t.elements()), 10 * attention_flops(t), t.shape()};
}

Problem loss(Arena& arena, int64_t size) {
  int64_t rows = rows_of(size, kClasses);
  CrossEntropy args{.logits = arena.normal(rows * kClasses),
                    .labels = arena.zeros<int32_t>(rows),
                    .d_logits = arena.zeros<float>(rows * kClasses),
                    .totals = arena.zeros<double>(2),
                    .workspace = arena.zeros<float>(2 * rows),
                    .rows = rows,
                    .classes = kClasses};
  return {[args](const Stream& s) { cross_entropy(s, args); }, times(8, rows, kClasses), 0,
          by(rows, kClasses)};
}

const KernelCase kModelCases[] = {
    {"gemm", "", "gemm", square_product<Precision::fp32, false, false>},
    {"gemm", "transposed a", "gemm", square_product<Precision::fp32, true, false>},
    {"gemm", "transposed b", "gemm", square_product<Precision::fp32, false, true>},
    {"gemm", "tf32", "gemm", square_product<Precision::tf32, false, false>},
    {"gemm", "bf16", "gemm", square_product<Precision::fp32, false, false, Bf16>},
    {"gemm", "attention", "gemm", attention_product},
    {"gemm", "gelu bf16", "gemm", gelu_product<Epilogue::gelu_tanh>},
    {"gemm", "d_gelu bf16", "gemm", gelu_product<Epilogue::d_gelu_tanh>},
    {"patchify", "", "vit", patchify_images},
    {"assemble_tokens", "", "vit", assemble},
    {"assemble_tokens_backward", "", "vit", assemble_backward},
    {"layer_norm", "", "vit", norm<float>},
    {"layer_norm", "bf16", "vit", norm<Bf16>},
    {"layer_norm_backward", "", "vit", norm_backward<float>},
    {"layer_norm_backward", "bf16", "vit", norm_backward<Bf16>},
    {"softmax", "", "vit", softmax_rows<float>},
    {"softmax", "bf16", "vit", softmax_rows<Bf16>},
    {"softmax_backward", "", "vit", softmax_rows_backward},
    {"bias_gelu", "", "vit", gelu<float>},
    {"bias_gelu", "bf16", "vit", gelu<Bf16>},
    {"bias_gelu", "tanh", "vit", gelu<float, Gelu::tanh>},
    {"bias_gelu", "tanh bf16", "vit", gelu<Bf16, Gelu::tanh>},
    {"bias_gelu_backward", "", "vit", gelu_backward<float>},
    {"bias_gelu_backward", "bf16", "vit", gelu_backward<Bf16>},
    {"bias_gelu_backward", "tanh", "vit", gelu_backward<float, Gelu::tanh>},
    {"bias_gelu_backward", "tanh bf16", "vit", gelu_backward<Bf16, Gelu::tanh>},
    {"bias_residual", "", "vit", residual_branch},
    {"column_sum", "", "vit", bias_gradient<float>},
    {"column_sum", "bf16", "vit", bias_gradient<Bf16>},
    {"combine_sums", "", "vit", combine},
    {"split_heads", "", "vit", split},
    {"split_heads_backward", "", "vit", split_backward},
    {"merge_heads", "", "vit", merge<false>},
    {"merge_heads", "inverse", "vit", merge<true>},
    {"attention", "", "vit", attend<float>},
    {"attention", "bf16", "vit", attend<Bf16>},
    {"attention_backward", "", "vit", attend_backward<float>},
    {"attention_backward", "bf16", "vit", attend_backward<Bf16>},
    {"cross_entropy", "", "vit", loss},
};

}  // namespace

std::span<const KernelCase> model_cases() {
  return kModelCases;
}

}  // namespace gradwire::bench
