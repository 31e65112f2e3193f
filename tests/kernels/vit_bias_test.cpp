// bias_residual and column_sum, its gradient.
#include <fmt/format.h>

#include "kernels/vit/bias.h"
#include "kernels/vit/gelu.h"
#include "kernels/vit/layer_norm.h"
#include "runtime/threads/thread_pool.h"
#include "tests/kernels/backend.h"
#include "tests/kernels/compare.h"

namespace gradwire::testing {
namespace {

struct Shape {
  int64_t rows, width;
  int64_t size() const { return rows * width; }
  std::string name() const { return fmt::format("{}x{}", rows, width); }
};
const std::vector<Shape> kShapes = {{0, 64},    {1, 1},    {5, 7},    {16, 31},   {17, 32},  {33, 33},
                                    {130, 127}, {64, 128}, {9, 129},  {1030, 10}, {2, 1023}, {3, 1024},
                                    {70, 192},  {5000, 3}, {2, 4099}, {257, 64}};

class VitBias : public OpTest {
 public:
  std::vector<float> sum_columns(const std::vector<float>& values, const std::vector<float>& start,
                                 const Shape& s, bool accumulate, int64_t misalign = 0) {
    auto x = array(values, misalign), sum = array(start);
    auto workspace = array<float>(column_sum_workspace(s.rows, s.width));
    ColumnSum args{.x = x.data(),
                   .sum = sum.data(),
                   .workspace = workspace.data(),
                   .rows = s.rows,
                   .width = s.width,
                   .accumulate = accumulate};
    GW_RUN(column_sum, args);
    sum.expect_guards_intact("sum");
    workspace.expect_guards_intact("workspace");
    return sum.host();
  }
};

TEST_P(VitBias, ResidualAddsAllThreeInPlaceOfAnyOfThem) {
  enum Alias { none, residual_is_x, y_is_x, no_residual, no_residual_y_is_x };
  for (const Shape& s : kShapes) {
    auto y_values = normal(s.size(), 1), bias_values = normal(s.width, 2),
         residual_values = normal(s.size(), 3);
    for (Alias alias : {none, residual_is_x, y_is_x, no_residual, no_residual_y_is_x}) {
      for (int64_t misalign : {0, 1}) {
        SCOPED_TRACE(
            fmt::format("{} aliasing case {} misaligned by {}", s.name(), static_cast<int>(alias), misalign));
        bool plain = alias == no_residual || alias == no_residual_y_is_x;
        std::vector<float> want(y_values.size());
        reference::bias_residual({.y = y_values.data(),
                                  .bias = bias_values.data(),
                                  .residual = plain ? nullptr : residual_values.data(),
                                  .x = want.data(),
                                  .rows = s.rows,
                                  .width = s.width});
        auto y = array(y_values, misalign), bias = array(bias_values, misalign),
             residual = array(residual_values, misalign), x = array<float>(s.size(), misalign);
        Array<float>& out = alias == residual_is_x                           ? residual
                            : alias == y_is_x || alias == no_residual_y_is_x ? y
                                                                             : x;
        BiasResidual args{.y = y.data(),
                          .bias = bias.data(),
                          .residual = plain ? nullptr : residual.data(),
                          .x = out.data(),
                          .rows = s.rows,
                          .width = s.width};
        GW_RUN(bias_residual, args);
        out.expect_guards_intact("x");
        expect_close(out.host(), want, 3e-7, "x", 2.0);
      }
    }
  }
}

TEST_P(VitBias, ColumnSumMatchesTheDoubleReference) {
  for (const Shape& s : kShapes) {
    auto x = normal(s.size(), 4), start = normal(s.width, 5);
    for (bool accumulate : {false, true}) {
      SCOPED_TRACE(s.name() + (accumulate ? " accumulating" : ""));
      auto want = start;
      reference::column_sum(
          {.x = x.data(), .sum = want.data(), .rows = s.rows, .width = s.width, .accumulate = accumulate});
      auto got = sum_columns(x, start, s, accumulate, accumulate ? 1 : 0);
      expect_close(got, want, 1e-6, "sum", std::sqrt(1.0 + static_cast<double>(s.rows)));
    }
  }
}

TEST_P(VitBias, ColumnSumCountsEveryRowOnce) {
  // Small integers add exactly, so one row too many or too few changes the sum.
  for (int64_t rows : {1, 15, 16, 17, 31, 33, 255, 256, 257, 4095, 4097, 8193}) {
    Shape s{rows, 5};
    std::vector<float> x(static_cast<size_t>(s.size())), want(5, 0.0f);
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = static_cast<float>((i * 7919) % 64);
      want[i % 5] += x[i];
    }
    expect_same_bits(sum_columns(x, std::vector<float>(5, -1.0f), s, false), want,
                     fmt::format("{} rows", rows));
  }
}

// The arrays of a batch, like those of layers, are at a constant stride with other data in between.
TEST_P(VitBias, PartialSumsOfABatchMatchThoseOfEachArray) {
  for (const Shape& s : kShapes) {
    for (int64_t gap : {0, 4, 5}) {
      SCOPED_TRACE(fmt::format("{} gap {}", s.name(), gap));
      constexpr int64_t kBatch = 3;
      const int64_t stride = s.size() + gap, partials = column_sum_workspace(s.rows, s.width);
      auto x = array(normal(kBatch * stride, 8));
      auto all = array<float>(kBatch * partials), sums = array(normal(kBatch * s.width, 9));
      ColumnSum<float> batch{.x = x.data(),
                             .workspace = all.data(),
                             .rows = s.rows,
                             .width = s.width,
                             .accumulate = true,
                             .partial_only = true,
                             .batch = kBatch,
                             .stride = stride};
      GW_RUN(column_sum, batch);
      CombineSums combine;
      for (int64_t i = 0; i < kBatch; ++i)
        combine.of[static_cast<size_t>(i)] = batch.sums(i, sums.data() + i * s.width);
      GW_RUN(combine_sums, combine);
      all.expect_guards_intact("workspace");
      sums.expect_guards_intact("sums");
      const auto values = x.host(), start = normal(kBatch * s.width, 9), got = sums.host();
      for (int64_t i = 0; i < kBatch; ++i) {
        auto part = [i](const std::vector<float>& of, int64_t at, int64_t count) {
          return std::vector<float>(of.begin() + i * at, of.begin() + i * at + count);
        };
        const auto want = sum_columns(part(values, stride, s.size()), part(start, s.width, s.width), s, true);
        expect_close(part(got, s.width, s.width), want, 1e-6, fmt::format("sum {}", i),
                     std::sqrt(1.0 + static_cast<double>(s.rows)));
      }
    }
  }
}

TEST_P(VitBias, ColumnSumHasTheSameBitsForAnyNumberOfThreads) {
  Shape s{3000, 70};
  auto x = normal(s.size(), 6);
  const int before = host_threads();
  auto first = sum_columns(x, normal(s.width, 7), s, false);
  for (int threads : thread_counts()) {
    set_host_threads(threads);
    expect_same_bits(sum_columns(x, normal(s.width, 7), s, false), first, "sum");
  }
  set_host_threads(before);
}

// Sums of different widths, with an unused one in between.
TEST_P(VitBias, CombinedSumsMatchSeparateOnesBitForBit) {
  const int64_t rows = 50, width = 72, wide = 136;
  auto x = array(normal(rows * width, 1)), dy = array(normal(rows * width, 2)),
       gamma = array(normal(width, 3));
  auto mean = array(normal(rows, 4)), rstd = array(normal(rows, 5)), pre = array(normal(rows * wide, 6));
  const auto start = normal(wide, 7);
  // Returns the gradients, by ops that add up their own sums or, if `together`, by one combined op.
  auto sums = [&](bool together) {
    auto dx = array<float>(rows * width), d_pre = array(normal(rows * wide, 8));
    auto norm_workspace = array<float>(layer_norm_backward_workspace(rows, width)),
         gelu_workspace = array<float>(column_sum_workspace(rows, wide));
    auto d_gamma = array<float>(width), d_beta = array<float>(width), d_bias = array(start);
    LayerNormBackward<float> norm{.x = x.data(),
                                  .dy = dy.data(),
                                  .gamma = gamma.data(),
                                  .mean = mean.data(),
                                  .rstd = rstd.data(),
                                  .dx = dx.data(),
                                  .d_gamma = d_gamma.data(),
                                  .d_beta = d_beta.data(),
                                  .workspace = norm_workspace.data(),
                                  .rows = rows,
                                  .width = width,
                                  .partial_only = together};
    GW_RUN(layer_norm_backward, norm);
    BiasGeluBackward<float> gelu{.pre = pre.data(),
                                 .dy = d_pre.data(),
                                 .d_pre = d_pre.data(),
                                 .d_bias = d_bias.data(),
                                 .workspace = gelu_workspace.data(),
                                 .rows = rows,
                                 .width = wide,
                                 .accumulate = true,
                                 .partial_only = together};
    GW_RUN(bias_gelu_backward, gelu);
    const CombineSums combine{{norm.sums(), PartialSums{}, gelu.sums()}};
    if (together) {
      expect_same_bits(d_bias.host(), start, "d_bias before the second stage");
      GW_RUN(combine_sums, combine);
    }
    d_gamma.expect_guards_intact("d_gamma");
    d_beta.expect_guards_intact("d_beta");
    d_bias.expect_guards_intact("d_bias");
    std::vector<float> all;
    for (const auto& some : {d_gamma.host(), d_beta.host(), d_bias.host()})
      all.insert(all.end(), some.begin(), some.end());
    if (together) {
      // Also compares with the reference's sums of the same partial sums.
      const auto partial = gelu_workspace.host();
      auto want = start;
      PartialSums of = gelu.sums();
      of.partial = partial.data();
      of.sums = {want.data()};
      reference::combine_sums({{of}});
      expect_close(d_bias.host(), want, 1e-6, "d_bias", 4.0);
    }
    return all;
  };
  expect_same_bits(sums(true), sums(false), "sums");
}

// Few rows need no first stage. BF16 rows are read unconverted.
TEST_P(VitBias, SecondStageAddsUpFewRowsOfEitherType) {
  for (int64_t rows : {int64_t{0}, int64_t{1}, int64_t{33}, kMostChunks}) {
    for (bool accumulate : {false, true}) {
      SCOPED_TRACE(fmt::format("{} rows, accumulate {}", rows, accumulate));
      constexpr int64_t kWidth = 37;
      const std::vector<float> values = normal(rows * kWidth, 3);
      std::vector<Bf16> rounded(values.size());
      std::transform(values.begin(), values.end(), rounded.begin(), [](float v) { return narrow<Bf16>(v); });
      auto x = array(values);
      auto x_bf16 = array(rounded);
      auto sums = array(normal(kWidth, 4)), sums_bf16 = array(normal(kWidth, 4));
      const ColumnSum<float> of{
          .x = x.data(), .sum = sums.data(), .rows = rows, .width = kWidth, .accumulate = accumulate};
      const ColumnSum<Bf16> of_bf16{.x = x_bf16.data(),
                                    .sum = sums_bf16.data(),
                                    .rows = rows,
                                    .width = kWidth,
                                    .accumulate = accumulate};
      const CombineSums combine{{of.of_rows(), of_bf16.of_rows()}};
      GW_RUN(combine_sums, combine);
      std::vector<float> want = normal(kWidth, 4), want_bf16 = want;
      reference::column_sum<float>(
          {.x = values.data(), .sum = want.data(), .rows = rows, .width = kWidth, .accumulate = accumulate});
      reference::column_sum<Bf16>({.x = rounded.data(),
                                   .sum = want_bf16.data(),
                                   .rows = rows,
                                   .width = kWidth,
                                   .accumulate = accumulate});
      const double scale = std::sqrt(1.0 + static_cast<double>(rows));
      expect_close(sums.host(), want, 1e-6, "sums", scale);
      expect_close(sums_bf16.host(), want_bf16, 1e-6, "sums of BF16", scale);
    }
  }
}

GW_INSTANTIATE_BACKENDS(VitBias);

}  // namespace
}  // namespace gradwire::testing
