// Cases of the ViT and its products, in ViT-B/32's shapes: 50 tokens, width 768, 12 heads, MLP 3072. `size`
// is the size of the main activation and determines the number of images or rows.
//
// In-place ops run repeatedly on the same memory, so their inputs are chosen such that values neither vanish
// nor explode (denormals would slow down the arithmetic).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
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

// A batch of images of kTokens x kWidth floats. A small size has fewer tokens.
struct Tokens {
  int64_t batch, tokens, elements;
  std::string shape;

  explicit Tokens(int64_t size) {
    const int64_t rows = rows_of(size, kWidth);
    batch = rows < kTokens ? 1 : rows / kTokens;
    tokens = rows < kTokens ? std::max<int64_t>(2, rows) : kTokens;
    elements = batch * tokens * kWidth;
    shape = fmt::format("{}x{}x{}", batch, tokens, kWidth);
  }
  // Returns `products` times half the operations of a product with the attention matrices: the sum of T^2 D
  // over all heads.
  double flops(int products) const {
    return products * static_cast<double>(elements) * static_cast<double>(tokens);
  }
};

// Returns operands of products as S: normally distributed values, or a constant. Bf16: a short pattern,
// repeated; the same values for every S.
template <typename S>
S* operands(Arena& a, int64_t count, std::optional<float> value = {}) {
  const int64_t length = std::is_same_v<S, float> ? count : std::min<int64_t>(count, 1 << 18);
  float* pattern = value ? a.filled(length, *value) : a.normal(length);
  if constexpr (std::is_same_v<S, float>) {
    return pattern;
  } else {
    S* out = a.zeros<S>(count);
    for (int64_t at = 0; at < count; at += length) {
      kBf16->reduce_encode(a.stream,
                           {.own = pattern, .wire = out + at, .count = std::min(length, count - at)});
    }
    return out;
  }
}

// Returns a product of square matrices. `options`: all but sizes and operands.
template <typename S = float>
KernelCase square_product(const char* variant, const Gemm& options) {
  return {"gemm", variant, "gemm", [options](Arena& a, int64_t size) {
            Gemm g = options;
            const bool has_aux = g.epilogue != Epilogue::none;
            const int64_t bytes = has_aux ? sizeof(S) : 4;
            auto n = static_cast<int64_t>(std::sqrt(static_cast<double>(size) / static_cast<double>(bytes)));
            if (has_aux) n = n / 8 * 8;
            g.m = g.n = g.k = g.lda = g.ldb = g.ldc = n;
            g.a = operands<S>(a, n * n);
            g.b = operands<S>(a, n * n);
            g.c = a.zeros<S>(n * n);
            if (has_aux) g.aux = operands<S>(a, n * n);
            const auto m = static_cast<double>(n);
            return problem(gemm, g, sizeof(S) * (has_aux ? 4.0 : 3.0), n * n, by(n, n), 2 * m * m * m);
          }};
}

// Returns the product Q K^T of all heads. `size` is the size of the attention matrices in bytes.
Problem attention_product(Arena& a, int64_t size) {
  const int64_t batch = std::max<int64_t>(1, size / 4 / (kTokens * kTokensPadded));
  Gemm g{.transpose_b = true, .m = kTokens, .n = kTokens, .k = kHeadDim, .batch = batch};
  g.a = a.normal(batch * kTokens * kHeadDim), g.lda = kHeadDim, g.stride_a = kTokens * kHeadDim;
  g.b = a.normal(batch * kTokens * kHeadDim), g.ldb = kHeadDim, g.stride_b = kTokens * kHeadDim;
  g.c = a.zeros(batch * kTokens * kTokensPadded), g.ldc = kTokensPadded;
  g.stride_c = kTokens * kTokensPadded;
  return problem(gemm, g, 4, kTokens * (2 * kHeadDim + kTokens) * batch,
                 fmt::format("{} of {}x{}x{}", batch, kTokens, kTokens, kHeadDim),
                 2.0 * kTokens * kTokens * kHeadDim * static_cast<double>(batch));
}

Problem patchify_images(Arena& a, int64_t size) {
  const bool small = size < 3 * 224 * 224 * 4;  // a smaller image
  Patchify args{.channels = 3, .image = small ? 16 : 224, .patch = small ? 8 : 32};
  const int64_t pixels = int64_t{3} * args.image * args.image;
  args.batch = std::max<int64_t>(1, size / 4 / pixels);
  args.images = a.normal(args.batch * pixels);
  args.patches = a.zeros(args.batch * pixels);
  return problem(patchify<float>, args, 8, args.batch * pixels,
                 fmt::format("{} of {}", args.batch, by(args.image, args.image)));
}

template <typename S>
Problem norm(Arena& a, int64_t size) {
  const int64_t rows = rows_of(size, kWidth), count = rows * kWidth;
  return problem(layer_norm<S>,
                 {a.normal(count), a.normal(kWidth), a.normal(kWidth), a.zeros<S>(count), a.zeros(rows),
                  a.zeros(rows), rows, kWidth},
                 4 + sizeof(S), count, by(rows, kWidth));
}

template <typename S>
Problem norm_backward(Arena& a, int64_t size) {
  const int64_t rows = rows_of(size, kWidth), count = rows * kWidth;
  LayerNormBackward<S> args{a.normal(count), operands<S>(a, count), a.normal(kWidth), a.zeros(rows),
                            a.filled(rows, 1.0f)};
  args.dx = a.zeros(count);
  args.d_gamma = a.zeros(kWidth);
  args.d_beta = a.zeros(kWidth);
  args.workspace = a.zeros(layer_norm_backward_workspace(rows, kWidth));
  args.rows = rows;
  args.width = kWidth;
  return problem(layer_norm_backward<S>, args, 8 + sizeof(S), count, by(rows, kWidth));
}

template <typename S>
Problem softmax_rows(Arena& a, int64_t size) {
  const int64_t rows = rows_of(size, kTokensPadded), count = rows * kTokensPadded;
  Softmax<S> args{.x = a.normal(count), .rows = rows, .width = kTokens, .ld = kTokensPadded};
  if constexpr (std::is_same_v<S, float>)
    args.y = args.x;
  else
    args.y = a.zeros<S>(count);
  return problem(softmax<S>, args, 4 + sizeof(S), count, by(rows, kTokens));
}

template <typename S, Gelu kForm = Gelu::exact>
Problem gelu(Arena& a, int64_t size) {
  const int64_t rows = rows_of(size, kMlp), count = rows * kMlp;
  return problem(bias_gelu<S>, {operands<S>(a, count), a.zeros<S>(count), rows, kMlp, kForm}, 2 * sizeof(S),
                 count, by(rows, kMlp));
}

template <typename S, Gelu kForm = Gelu::exact>
Problem gelu_backward(Arena& a, int64_t size) {
  const int64_t rows = rows_of(size, kMlp), count = rows * kMlp;
  constexpr float kSlopeOne = 0.75179f;  // the slope of GELU is 1 at this value
  BiasGeluBackward<S> args{.rows = rows, .width = kMlp, .form = kForm};
  args.dy = args.d_pre = operands<S>(a, count);
  args.pre = operands<S>(a, count, kSlopeOne);
  args.d_bias = a.zeros(kMlp);
  args.workspace = a.zeros(column_sum_workspace(rows, kMlp));
  return problem(bias_gelu_backward<S>, args, 3 * sizeof(S), count, by(rows, kMlp));
}

template <typename S>
Problem bias_gradient(Arena& a, int64_t size) {
  const int64_t rows = rows_of(size, kWidth), count = rows * kWidth;
  return problem(
      column_sum<S>,
      {operands<S>(a, count), a.zeros(kWidth), a.zeros(column_sum_workspace(rows, kWidth)), rows, kWidth},
      sizeof(S), count, by(rows, kWidth));
}

// For split, merge and attention, `size` is the size of (B, T, C) in bytes; qkv is three times as large.
template <int kParts>
Problem move(void (*op)(const Stream&, const Heads<float>&), Arena& a, int64_t size, bool bias = false) {
  const Tokens t(size);
  Heads<float> args{.batch = t.batch, .tokens = t.tokens, .heads = kHeads, .head_dim = kHeadDim};
  args.rows = a.normal(kParts * t.elements);
  for (int i = 0; i < kParts; ++i) args.parts[i] = a.normal(t.elements);
  if (bias) args.bias = a.normal(kParts * kWidth);
  return problem(op, args, 8 * kParts, t.elements, t.shape);
}

template <typename S>
Problem attend(Arena& a, int64_t size) {
  const Tokens t(size);
  return problem(attention<S>,
                 {operands<S>(a, 3 * t.elements), a.zeros<S>(t.elements),
                  a.zeros(2 * t.batch * kHeads * t.tokens), t.batch, t.tokens, kHeads, kHeadDim},
                 4 * sizeof(S), t.elements, t.shape, t.flops(4));
}

template <typename S>
Problem attend_backward(Arena& a, int64_t size) {
  const Tokens t(size);
  return problem(
      attention_backward<S>,
      {operands<S>(a, 3 * t.elements), a.zeros<S>(t.elements), operands<S>(a, t.elements),
       a.filled(2 * t.batch * kHeads * t.tokens, 1.0f), a.zeros<S>(3 * t.elements), a.zeros(3 * kWidth),
       a.zeros(attention_backward_workspace(t.batch, t.tokens, kWidth)), t.batch, t.tokens, kHeads, kHeadDim},
      8 * sizeof(S), t.elements, t.shape, t.flops(10));
}

const KernelCase kModelCases[] = {
    square_product("", {}),
    square_product("transposed a", {.transpose_a = true}),
    square_product("transposed b", {.transpose_b = true}),
    square_product("tf32", {.precision = Precision::tf32}),
    square_product<Bf16>("bf16", {}),
    {"gemm", "attention", "gemm", attention_product},
    square_product<Bf16>("gelu bf16", {.transpose_b = true, .epilogue = Epilogue::gelu_tanh}),
    square_product<Bf16>("d_gelu bf16", {.epilogue = Epilogue::d_gelu_tanh}),
    {"patchify", "", "vit", patchify_images},
    {"assemble_tokens", "", "vit",
     [](Arena& a, int64_t size) {
       const Tokens t(size);
       return problem(assemble_tokens<float>,
                      {a.normal(t.elements), a.normal(kWidth), a.normal(kWidth), a.normal(t.tokens * kWidth),
                       a.zeros(t.elements), t.batch, t.tokens, kWidth},
                      8, t.elements, t.shape);
     }},
    {"assemble_tokens_backward", "", "vit",
     [](Arena& a, int64_t size) {
       const Tokens t(size);
       return problem(assemble_tokens_backward<float>,
                      {a.normal(t.elements), a.zeros(t.elements), a.zeros(kWidth), a.zeros(kWidth),
                       a.zeros(t.tokens * kWidth), a.zeros(t.tokens * kWidth), t.batch, t.tokens, kWidth},
                      8, t.elements, t.shape);
     }},
    {"layer_norm", "", "vit", norm<float>},
    {"layer_norm", "bf16", "vit", norm<Bf16>},
    {"layer_norm_backward", "", "vit", norm_backward<float>},
    {"layer_norm_backward", "bf16", "vit", norm_backward<Bf16>},
    {"softmax", "", "vit", softmax_rows<float>},
    {"softmax", "bf16", "vit", softmax_rows<Bf16>},
    {"softmax_backward", "", "vit",
     [](Arena& a, int64_t size) {
       // If every y is 1 / width, and with a scale of width, the op only subtracts the mean. The op can
       // therefore be repeated.
       const int64_t rows = rows_of(size, kTokensPadded), count = rows * kTokensPadded;
       return problem(
           softmax_backward<float>,
           {a.filled(count, 1.0f / kTokens), a.normal(count), rows, kTokens, kTokensPadded, kTokens}, 12,
           count, by(rows, kTokens));
     }},
    {"bias_gelu", "", "vit", gelu<float>},
    {"bias_gelu", "bf16", "vit", gelu<Bf16>},
    {"bias_gelu", "tanh", "vit", gelu<float, Gelu::tanh>},
    {"bias_gelu", "tanh bf16", "vit", gelu<Bf16, Gelu::tanh>},
    {"bias_gelu_backward", "", "vit", gelu_backward<float>},
    {"bias_gelu_backward", "bf16", "vit", gelu_backward<Bf16>},
    {"bias_gelu_backward", "tanh", "vit", gelu_backward<float, Gelu::tanh>},
    {"bias_gelu_backward", "tanh bf16", "vit", gelu_backward<Bf16, Gelu::tanh>},
    {"column_sum", "", "vit", bias_gradient<float>},
    {"column_sum", "bf16", "vit", bias_gradient<Bf16>},
    {"combine_sums", "", "vit",
     [](Arena& a,
        int64_t size) {  // three adjacent sums of up to 100 rows, as in the backward of a layer norm
       const int64_t rows = std::min<int64_t>(100, rows_of(size, 3 * kWidth)), count = rows * 3 * kWidth;
       CombineSums args;
       args.of[0] = {a.normal(count), rows, 3 * kWidth, kWidth};
       args.of[0].sums = {a.zeros(kWidth), a.zeros(kWidth), a.zeros(kWidth)};
       return problem(combine_sums, args, 4, count, by(rows, 3 * kWidth));
     }},
    {"split_heads", "", "vit", [](Arena& a, int64_t size) { return move<1>(split_heads<float>, a, size); }},
    {"split_heads", "qkv", "vit",
     [](Arena& a, int64_t size) { return move<3>(split_heads<float>, a, size, true); }},
    {"merge_heads", "", "vit", [](Arena& a, int64_t size) { return move<1>(merge_heads<float>, a, size); }},
    {"merge_heads", "qkv", "vit",
     [](Arena& a, int64_t size) { return move<3>(merge_heads<float>, a, size); }},
    {"attention", "", "vit", attend<float>, false},
    {"attention", "bf16", "vit", attend<Bf16>, false},
    {"attention_backward", "", "vit", attend_backward<float>, false},
    {"attention_backward", "bf16", "vit", attend_backward<Bf16>, false},
    {"cross_entropy", "", "vit",
     [](Arena& a, int64_t size) {
       const int64_t rows = rows_of(size, kClasses), count = rows * kClasses;
       return problem(cross_entropy<float>,
                      {a.normal(count), a.zeros<int32_t>(rows), a.zeros(count), a.zeros<double>(2),
                       a.zeros(2 * rows), rows, kClasses},
                      8, count, by(rows, kClasses));
     }},
};

}  // namespace

std::span<const KernelCase> model_cases() {
  return kModelCases;
}

}  // namespace gradwire::bench
