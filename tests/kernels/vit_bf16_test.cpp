// The ops of vit.h with BF16 operands. An op that only moves operands has the reference's bits. An op that
// computes is within one rounding of the FP32 reference on the same (widened) operands; arithmetic in lower
// precision than FP32, or a second rounding, would exceed that.
#include <fmt/format.h>

#include "kernels/vit/vit.h"
#include "runtime/threads/thread_pool.h"
#include "tests/kernels/backend.h"
#include "tests/kernels/compare.h"

namespace gradwire::testing {
namespace {

std::vector<Bf16> rounded(const std::vector<float>& values) {
  std::vector<Bf16> out;
  for (float v : values) out.push_back(narrow<Bf16>(v));
  return out;
}
std::vector<float> widened(const std::vector<Bf16>& values) {
  std::vector<float> out;
  for (Bf16 v : values) out.push_back(widen(v));
  return out;
}
// Returns normal draws that BF16 can represent.
std::vector<float> draws(int64_t count, uint32_t seed, float scale = 1.0f) {
  return widened(rounded(OpTest::normal(count, seed, scale)));
}

// A rounding to nearest is off by at most 2^-8 of the value; `slack` is the absolute error of FP32
// arithmetic.
void expect_rounded(const std::vector<Bf16>& got, const std::vector<float>& want, const std::string& what,
                    double slack = 4e-6) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    const double value = widen(got[i]), error = std::abs(value - want[i]);
    ASSERT_LE(error, std::abs(static_cast<double>(want[i])) / 256 * (1 + 1e-4) + slack)
        << what << "[" << i << "] of " << got.size() << ": got " << value << ", want " << want[i];
  }
}
void expect_same_operands(const std::vector<Bf16>& got, const std::vector<Bf16>& want,
                          const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i].bits, want[i].bits) << what << "[" << i << "]";
}

struct Shape {
  int64_t rows, width;
  int64_t size() const { return rows * width; }
};
// Each way of holding a row in registers, and rows too long for registers.
const std::vector<Shape> kShapes = {{0, 64},  {1, 1},   {5, 7},   {35, 64},  {6, 72},
                                    {3, 136}, {4, 264}, {3, 520}, {2, 1024}, {2, 1032}};

class VitBf16 : public OpTest {
 public:
  // Calls check(shape, misalign) for every shape, aligned and unaligned.
  template <typename Check>
  void for_shapes(const Check& check) {
    for (const Shape& s : kShapes) {
      for (int64_t misalign : {0, 1}) {
        SCOPED_TRACE(fmt::format("{}x{} misaligned by {}", s.rows, s.width, misalign));
        check(s, misalign);
      }
    }
  }
  Array<Bf16> operands(const std::vector<float>& values, int64_t misalign) {
    return array(rounded(values), misalign);
  }
};

TEST_P(VitBf16, GeluRoundsOnceForwardAndBackward) {
  for_shapes([&](const Shape& s, int64_t misalign) {
    for (Gelu form : {Gelu::exact, Gelu::tanh}) {
      auto product = draws(s.size(), 1, 2.0f), bias = normal(s.width, 2), gradient = draws(s.size(), 3);
      for (bool with_bias : {true, false}) {
        auto x = operands(product, misalign), y = array<Bf16>(s.size(), misalign);
        auto d_bias = array(bias, misalign);
        BiasGelu<Bf16> args{.x = x.data(),
                            .bias = with_bias ? d_bias.data() : nullptr,
                            .y = y.data(),
                            .rows = s.rows,
                            .width = s.width,
                            .form = form};
        GW_RUN(bias_gelu, args);
        x.expect_guards_intact("x");
        y.expect_guards_intact("y");
        auto sum = product, pre = widened(x.host());
        for (size_t i = 0; with_bias && i < sum.size(); ++i) sum[i] += bias[i % static_cast<size_t>(s.width)];
        expect_rounded(x.host(), sum, "pre");
        std::vector<float> want(pre.size());
        reference::bias_gelu(
            {.x = pre.data(), .y = want.data(), .rows = s.rows, .width = s.width, .form = form});
        expect_rounded(y.host(), want, "y");
      }
      auto want = gradient;
      std::vector<float> want_bias(static_cast<size_t>(s.width));
      reference::bias_gelu_backward({.pre = product.data(),
                                     .dy = want.data(),
                                     .d_pre = want.data(),
                                     .d_bias = want_bias.data(),
                                     .rows = s.rows,
                                     .width = s.width,
                                     .form = form});
      auto pre = operands(product, misalign), dy = operands(gradient, misalign);
      auto d_bias = array<float>(s.width), workspace = array<float>(column_sum_workspace(s.rows, s.width));
      BiasGeluBackward<Bf16> args{.pre = pre.data(),
                                  .dy = dy.data(),
                                  .d_pre = dy.data(),
                                  .d_bias = d_bias.data(),
                                  .workspace = workspace.data(),
                                  .rows = s.rows,
                                  .width = s.width,
                                  .form = form};
      GW_RUN(bias_gelu_backward, args);
      dy.expect_guards_intact("dy");
      expect_rounded(dy.host(), want, "dy");
      expect_close(d_bias.host(), want_bias, 3e-6, "d_bias", 6.0);  // summed before rounding
    }
  });
}

// Expects the nearest BF16 value, or its neighbour if the exact result is almost halfway: for every operand
// from 2^-10 to 9, of either sign, including tails.
TEST_P(VitBf16, GeluRoundsEveryOperandToNearest) {
  std::vector<Bf16> all;
  for (uint16_t bits = 0x3a80; bits <= 0x4110; ++bits) {
    all.push_back({bits});
    all.push_back({static_cast<uint16_t>(bits | 0x8000u)});
  }
  const auto count = std::ssize(all);
  for (Gelu form : {Gelu::exact, Gelu::tanh}) {
    SCOPED_TRACE(form == Gelu::exact ? "exact" : "tanh");
    auto x = array(all), y = array<Bf16>(count), slope = array(std::vector<Bf16>(all.size(), {0x3f80}));
    auto d_bias = array<float>(count), workspace = array<float>(column_sum_workspace(1, count));
    BiasGelu<Bf16> forward{.x = x.data(), .y = y.data(), .rows = 1, .width = count, .form = form};
    GW_RUN(bias_gelu, forward);
    BiasGeluBackward<Bf16> backward{.pre = x.data(),
                                    .dy = slope.data(),
                                    .d_pre = slope.data(),
                                    .d_bias = d_bias.data(),
                                    .workspace = workspace.data(),
                                    .rows = 1,
                                    .width = count,
                                    .form = form};
    GW_RUN(bias_gelu_backward, backward);
    const auto got = y.host(), got_slope = slope.host();
    for (size_t i = 0; i < all.size(); ++i) {
      const double v = widen(all[i]), root = std::sqrt(2.0 / M_PI);
      double cdf = 0.5 * std::erfc(-v / std::sqrt(2.0)), density = 0.5 * root * std::exp(-0.5 * v * v);
      if (form == Gelu::tanh) {
        const double e = std::exp(-2.0 * root * (v + 0.044715 * v * v * v));
        cdf = 1.0 / (1.0 + e);
        density = 2.0 * root * (1.0 + 0.134145 * v * v) * e * cdf * cdf;
      }
      const auto half_unit = [](double value) { return std::ldexp(1.0, std::ilogb(value) - 8); };
      ASSERT_NEAR(widen(got[i]), v * cdf, half_unit(v * cdf) + 1e-5 * std::abs(v * cdf)) << "at " << v;
      // The slope changes sign, where it is a difference of two terms.
      ASSERT_NEAR(widen(got_slope[i]), cdf + v * density,
                  half_unit(cdf + v * density) + 1e-5 * (cdf + std::abs(v) * density))
          << "at " << v;
    }
  }
}

TEST_P(VitBf16, FloatGeluWithoutABiasReadsOnlyThePreActivation) {
  const Shape s{9, 20};
  auto pre = normal(s.size(), 1);
  std::vector<float> want(pre.size());
  reference::bias_gelu({.x = pre.data(), .y = want.data(), .rows = s.rows, .width = s.width});
  auto x = array(pre), y = array<float>(s.size());
  BiasGelu<float> args{.x = x.data(), .y = y.data(), .rows = s.rows, .width = s.width};
  GW_RUN(bias_gelu, args);
  expect_same_bits(x.host(), pre, "x");
  expect_close(y.host(), want, 5e-7, "y", 0.0);
}

TEST_P(VitBf16, SumsAndResidualsWidenOperands) {
  for_shapes([&](const Shape& s, int64_t misalign) {
    auto values = draws(s.size(), 4), bias = normal(s.width, 5), residual = normal(s.size(), 6);
    std::vector<float> want(static_cast<size_t>(s.width)), want_x(values.size());
    reference::column_sum({.x = values.data(), .sum = want.data(), .rows = s.rows, .width = s.width});
    auto x = operands(values, misalign);
    auto sum = array<float>(s.width), workspace = array<float>(column_sum_workspace(s.rows, s.width));
    ColumnSum<Bf16> args{
        .x = x.data(), .sum = sum.data(), .workspace = workspace.data(), .rows = s.rows, .width = s.width};
    GW_RUN(column_sum, args);
    expect_close(sum.host(), want, 1e-6, "sum", 6.0);
    reference::bias_residual({.y = values.data(),
                              .bias = bias.data(),
                              .residual = residual.data(),
                              .x = want_x.data(),
                              .rows = s.rows,
                              .width = s.width});
    auto d_bias = array(bias, misalign), out = array(residual, misalign);
    BiasResidual<Bf16> join{.y = x.data(),
                            .bias = d_bias.data(),
                            .residual = out.data(),
                            .x = out.data(),
                            .rows = s.rows,
                            .width = s.width};
    GW_RUN(bias_residual, join);
    out.expect_guards_intact("x");
    expect_close(out.host(), want_x, 3e-7, "x", 2.0);
  });
}

TEST_P(VitBf16, LayerNormKeepsTheResidualStreamInFp32AndRoundsItsOutput) {
  for_shapes([&](const Shape& s, int64_t misalign) {
    auto values = normal(s.size(), 7, 2.0f), gamma = normal(s.width, 8), beta = normal(s.width, 9),
         bias = normal(s.width, 10), product = draws(s.size(), 11);
    for (bool joins : {false, true}) {
      std::vector<float> sum(values.size()), y(values.size()), mean(static_cast<size_t>(s.rows)), rstd(mean);
      reference::layer_norm({.x = values.data(),
                             .gamma = gamma.data(),
                             .beta = beta.data(),
                             .y = y.data(),
                             .mean = mean.data(),
                             .rstd = rstd.data(),
                             .rows = s.rows,
                             .width = s.width,
                             .branch = joins ? product.data() : nullptr,
                             .branch_bias = bias.data(),
                             .sum = sum.data()});
      auto x = array(values, misalign), d_gamma = array(gamma, misalign), d_beta = array(beta, misalign),
           d_bias = array(bias, misalign), d_mean = array<float>(s.rows), d_rstd = array<float>(s.rows);
      auto branch = operands(product, misalign), d_y = array<Bf16>(s.size(), misalign);
      LayerNorm<Bf16> args{.x = x.data(),
                           .gamma = d_gamma.data(),
                           .beta = d_beta.data(),
                           .y = d_y.data(),
                           .mean = d_mean.data(),
                           .rstd = d_rstd.data(),
                           .rows = s.rows,
                           .width = s.width,
                           .branch = joins ? branch.data() : nullptr,
                           .branch_bias = joins ? d_bias.data() : nullptr,
                           .sum = joins ? x.data() : nullptr};
      GW_RUN(layer_norm, args);
      x.expect_guards_intact("sum");
      d_y.expect_guards_intact("y");
      expect_same_bits(x.host(), joins ? sum : values, "sum");
      expect_rounded(d_y.host(), y, "y", 2e-5);
      expect_close(d_mean.host(), mean, 1e-6, "mean");
      expect_close(d_rstd.host(), rstd, 3e-6, "rstd");
    }
  });
}

TEST_P(VitBf16, LayerNormBackwardAddsInFp32AndWritesARoundedCopy) {
  for_shapes([&](const Shape& s, int64_t misalign) {
    auto values = normal(s.size(), 12, 2.0f), gamma = normal(s.width, 13), gradient = draws(s.size(), 14),
         stream_gradient = normal(s.size(), 15);
    std::vector<float> y(values.size()), mean(static_cast<size_t>(s.rows)), rstd(mean);
    const std::vector<float> beta(static_cast<size_t>(s.width));
    reference::layer_norm({.x = values.data(),
                           .gamma = gamma.data(),
                           .beta = beta.data(),
                           .y = y.data(),
                           .mean = mean.data(),
                           .rstd = rstd.data(),
                           .rows = s.rows,
                           .width = s.width});
    auto want = stream_gradient;
    std::vector<float> want_gamma(beta.size()), want_beta(beta.size());
    reference::layer_norm_backward({.x = values.data(),
                                    .dy = gradient.data(),
                                    .gamma = gamma.data(),
                                    .mean = mean.data(),
                                    .rstd = rstd.data(),
                                    .dx = want.data(),
                                    .d_gamma = want_gamma.data(),
                                    .d_beta = want_beta.data(),
                                    .rows = s.rows,
                                    .width = s.width,
                                    .accumulate_dx = true});
    auto x = array(values, misalign), d_gamma = array(gamma, misalign), dx = array(stream_gradient, misalign),
         d_mean = array(mean), d_rstd = array(rstd), out_gamma = array<float>(s.width),
         out_beta = array<float>(s.width),
         workspace = array<float>(layer_norm_backward_workspace(s.rows, s.width));
    auto dy = operands(gradient, misalign), copy = array<Bf16>(s.size(), misalign);
    LayerNormBackward<Bf16> args{.x = x.data(),
                                 .dy = dy.data(),
                                 .gamma = d_gamma.data(),
                                 .mean = d_mean.data(),
                                 .rstd = d_rstd.data(),
                                 .dx = dx.data(),
                                 .dx_rounded = copy.data(),
                                 .d_gamma = out_gamma.data(),
                                 .d_beta = out_beta.data(),
                                 .workspace = workspace.data(),
                                 .rows = s.rows,
                                 .width = s.width,
                                 .accumulate_dx = true};
    GW_RUN(layer_norm_backward, args);
    dx.expect_guards_intact("dx");
    copy.expect_guards_intact("dx_rounded");
    double scale = 1.0;
    for (float r : rstd) scale = std::max<double>(scale, r);  // a row of one element has rstd 1000
    expect_close(dx.host(), want, 3e-6, "dx", scale);
    expect_same_operands(copy.host(), rounded(dx.host()), "dx_rounded");
    expect_close(out_gamma.host(), want_gamma, 1e-5, "d_gamma", 6.0);
    expect_close(out_beta.host(), want_beta, 1e-5, "d_beta", 6.0);
  });
}

TEST_P(VitBf16, SoftmaxReadsFp32ScoresAndRoundsOnce) {
  for_shapes([&](const Shape& s, int64_t misalign) {
    const int64_t width = s.width > 3 ? s.width - 3 : s.width;  // the rest is padding
    const float scale = 0.5f;
    auto scores = normal(s.size(), 16, 4.0f), gradient = draws(s.size(), 17);
    auto want = scores;
    reference::softmax(
        {.x = want.data(), .y = want.data(), .rows = s.rows, .width = width, .ld = s.width, .scale = scale});
    auto x = array(scores, misalign);
    auto y = array<Bf16>(s.size(), misalign), dy = operands(gradient, misalign);
    Softmax<Bf16> args{
        .x = x.data(), .y = y.data(), .rows = s.rows, .width = width, .ld = s.width, .scale = scale};
    GW_RUN(softmax, args);
    y.expect_guards_intact("y");
    expect_rounded(y.host(), want, "y", 1e-7);
    auto p = widened(y.host());
    reference::softmax_backward({.y = p.data(),
                                 .dy = gradient.data(),
                                 .rows = s.rows,
                                 .width = width,
                                 .ld = s.width,
                                 .scale = scale});
    SoftmaxBackward<Bf16> back{
        .y = y.data(), .dy = dy.data(), .rows = s.rows, .width = width, .ld = s.width, .scale = scale};
    GW_RUN(softmax_backward, back);
    dy.expect_guards_intact("dy");
    expect_rounded(dy.host(), gradient, "dx", 1e-6);
  });
}

TEST_P(VitBf16, MovesHeadsBitForBit) {
  struct Heads {
    int64_t batch, tokens, heads, dim;
  };
  for (Heads h : {Heads{0, 17, 4, 16}, Heads{3, 17, 4, 16}, Heads{2, 5, 3, 7}, Heads{1, 9, 2, 40}}) {
    for (int64_t misalign : {0, 1}) {
      const int64_t size = h.batch * h.tokens * h.heads * h.dim;
      auto values = draws(3 * size, 18), bias = normal(3 * h.heads * h.dim, 19);
      auto host_qkv = rounded(values);
      std::vector<Bf16> want(static_cast<size_t>(3 * size)), merged(static_cast<size_t>(size));
      SplitHeads<Bf16> split{.qkv = host_qkv.data(),
                             .bias = bias.data(),
                             .q = want.data(),
                             .k = want.data() + size,
                             .v = want.data() + 2 * size,
                             .batch = h.batch,
                             .tokens = h.tokens,
                             .heads = h.heads,
                             .head_dim = h.dim};
      reference::split_heads(split);
      auto qkv = operands(values, misalign), q = array<Bf16>(size, misalign), k = array<Bf16>(size, misalign),
           v = array<Bf16>(size, misalign), back = array<Bf16>(3 * size, misalign),
           one = array<Bf16>(size, misalign);
      auto d_bias = array(bias, misalign);
      split.qkv = qkv.data(), split.bias = d_bias.data();
      split.q = q.data(), split.k = k.data(), split.v = v.data();
      GW_RUN(split_heads, split);
      auto all = q.host();
      for (const auto* part : {&k, &v}) {
        auto values_of_part = part->host();
        all.insert(all.end(), values_of_part.begin(), values_of_part.end());
      }
      expect_same_operands(all, want, "q, k, v");
      // Without a bias, split_heads is inverted by its backward.
      split.bias = nullptr;
      GW_RUN(split_heads, split);
      SplitHeadsBackward<Bf16> unsplit{.dq = q.data(),
                                       .dk = k.data(),
                                       .dv = v.data(),
                                       .d_qkv = back.data(),
                                       .batch = h.batch,
                                       .tokens = h.tokens,
                                       .heads = h.heads,
                                       .head_dim = h.dim};
      GW_RUN(split_heads_backward, unsplit);
      back.expect_guards_intact("d_qkv");
      expect_same_operands(back.host(), host_qkv, "d_qkv");
      auto host_q = q.host();
      MergeHeads<Bf16> merge{.in = host_q.data(),
                             .out = merged.data(),
                             .batch = h.batch,
                             .tokens = h.tokens,
                             .heads = h.heads,
                             .head_dim = h.dim};
      reference::merge_heads(merge);
      merge.in = q.data(), merge.out = one.data();
      GW_RUN(merge_heads, merge);
      one.expect_guards_intact("merged");
      expect_same_operands(one.host(), merged, "merged");
    }
  }
}

TEST_P(VitBf16, RoundsTokensAndPatchesWhenMovingThem) {
  struct Image {
    int64_t batch;
    int32_t channels, image, patch;
  };
  for (Image i : {Image{2, 2, 16, 8}, Image{3, 1, 15, 5}}) {
    for (int64_t misalign : {0, 1}) {
      const int64_t grid = i.image / i.patch, tokens = grid * grid + 1;
      const int64_t width = int64_t{i.channels} * i.patch * i.patch, size = i.batch * (tokens - 1) * width;
      auto pixels = normal(i.batch * i.channels * i.image * i.image, 20);
      std::vector<Bf16> want(static_cast<size_t>(size));
      Patchify<Bf16> cut{.images = pixels.data(),
                         .patches = want.data(),
                         .batch = i.batch,
                         .channels = i.channels,
                         .image = i.image,
                         .patch = i.patch};
      reference::patchify(cut);
      auto images = array(pixels, misalign);
      auto patches = array<Bf16>(size, misalign);
      cut.images = images.data(), cut.patches = patches.data();
      GW_RUN(patchify, cut);
      patches.expect_guards_intact("patches");
      expect_same_operands(patches.host(), want, "patches");

      auto projected = widened(want), bias = normal(width, 21), first = normal(width, 22),
           position = normal(tokens * width, 23), gradient = normal(i.batch * tokens * width, 24);
      std::vector<float> x(gradient.size());
      reference::assemble_tokens({.projected = projected.data(),
                                  .bias = bias.data(),
                                  .class_token = first.data(),
                                  .position = position.data(),
                                  .x = x.data(),
                                  .batch = i.batch,
                                  .tokens = tokens,
                                  .width = width});
      auto d_bias = array(bias, misalign), d_first = array(first, misalign),
           d_position = array(position, misalign),
           d_x = array<float>(static_cast<int64_t>(x.size()), misalign), dx = array(gradient, misalign);
      AssembleTokens<Bf16> put{.projected = patches.data(),
                               .bias = d_bias.data(),
                               .class_token = d_first.data(),
                               .position = d_position.data(),
                               .x = d_x.data(),
                               .batch = i.batch,
                               .tokens = tokens,
                               .width = width};
      GW_RUN(assemble_tokens, put);
      expect_close(d_x.host(), x, 3e-7, "x", 3.0);
      std::vector<float> want_bias(bias.size()), want_first(bias.size()), want_position(position.size());
      AssembleTokensBackward<Bf16> back{.dx = gradient.data(),
                                        .d_projected = want.data(),
                                        .d_bias = want_bias.data(),
                                        .d_class_token = want_first.data(),
                                        .d_position = want_position.data(),
                                        .batch = i.batch,
                                        .tokens = tokens,
                                        .width = width};
      reference::assemble_tokens_backward(back);
      back.dx = dx.data(), back.d_projected = patches.data(), back.d_bias = d_bias.data();
      back.d_class_token = d_first.data(), back.d_position = d_position.data();
      GW_RUN(assemble_tokens_backward, back);
      patches.expect_guards_intact("d_projected");
      expect_same_operands(patches.host(), want, "d_projected");
      expect_close(d_bias.host(), want_bias, 3e-6, "d_bias", 3.0);
      expect_close(d_first.host(), want_first, 2e-6, "d_class_token");
      expect_close(d_position.host(), want_position, 2e-6, "d_position");
    }
  }
}

TEST_P(VitBf16, CrossEntropyRoundsTheGradientsOfFp32Logits) {
  const int64_t classes = 45;
  for (const int64_t rows : {int64_t{11}, CrossEntropy<Bf16>::kOneBlock + 8}) {  // in one launch and in two
    auto logits = normal(rows * classes, 25, 3.0f);
    std::vector<int32_t> labels;
    for (int32_t r = 0; r < rows; ++r) labels.push_back(r == 4 ? -1 : r * 4 % 45);
    std::vector<float> want(logits.size());
    double want_totals[2] = {0, 0};
    reference::cross_entropy({.logits = logits.data(),
                              .labels = labels.data() + 5,
                              .d_logits = want.data(),
                              .totals = want_totals,
                              .rows = rows - 5,
                              .classes = classes,
                              .grad_scale = 0.25f});
    auto x = array(logits), workspace = array<float>(2 * rows);
    auto d_labels = array(labels);
    auto totals = array(std::vector<double>{0, 0});
    auto d = array<Bf16>(rows * classes);
    // Excludes the row with an invalid label, whose NaN reaches the total.
    CrossEntropy<Bf16> args{.logits = x.data(),
                            .labels = d_labels.data() + 5,
                            .d_logits = d.data(),
                            .totals = totals.data(),
                            .workspace = workspace.data(),
                            .rows = rows - 5,
                            .classes = classes,
                            .grad_scale = 0.25f};
    GW_RUN(cross_entropy, args);
    auto got = d.host();
    const auto valid = static_cast<size_t>((rows - 5) * classes);
    got.resize(valid);
    want.resize(valid);
    expect_rounded(got, want, "d_logits", 1e-7);
    EXPECT_NEAR(totals.host()[0], want_totals[0], 1e-5);
    EXPECT_EQ(totals.host()[1], want_totals[1]);
    args.labels = d_labels.data();
    args.rows = rows;
    GW_RUN(cross_entropy, args);
    got = d.host();
    for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(std::isnan(widen(got[i])), i / classes == 4) << i;
  }
}

GW_INSTANTIATE_BACKENDS(VitBf16);

TEST(Bf16Operand, RoundsToNearestEvenAndPreservesNanAndInfinity) {
  EXPECT_EQ(narrow<Bf16>(1.0f).bits, 0x3f80);
  EXPECT_EQ(narrow<Bf16>(1.0f + 1.0f / 256).bits, 0x3f80);  // ties round to even
  EXPECT_EQ(narrow<Bf16>(1.0f + 3.0f / 256).bits, 0x3f82);
  EXPECT_EQ(narrow<Bf16>(1.0f + 1.001f / 256).bits, 0x3f81);
  EXPECT_EQ(narrow<Bf16>(-0.0f).bits, 0x8000);
  EXPECT_EQ(narrow<Bf16>(3.4e38f).bits, 0x7f80);  // beyond the largest finite value
  EXPECT_EQ(narrow<Bf16>(-std::numeric_limits<float>::infinity()).bits, 0xff80);
  EXPECT_TRUE(std::isnan(widen(narrow<Bf16>(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_TRUE(std::isnan(widen(narrow<Bf16>(bits_float(0x7f800001u)))));  // payload only in the lost half
}

}  // namespace
}  // namespace gradwire::testing
