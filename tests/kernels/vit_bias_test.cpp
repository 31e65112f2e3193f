// column_sum(), the gradient of a bias, and combine_sums().
#include "kernels/vit/elementwise.h"
#include "kernels/vit/layer_norm.h"
#include "tests/kernels/operand.h"

namespace gradwire::testing {
namespace {

const std::vector<RowsByWidth> kShapes = {{0, 64},    {1, 1},    {5, 7},    {16, 31},   {17, 32},  {33, 33},
                                          {130, 127}, {64, 128}, {9, 129},  {1030, 10}, {2, 1023}, {3, 1024},
                                          {70, 192},  {5000, 3}, {2, 4099}, {257, 64},  {3, 520}};

// Returns the error of a sum over rows, relative to the error of one element.
double sum_scale(int64_t rows) {
  return std::sqrt(1.0 + static_cast<double>(rows));
}

class VitBias : public OpTest {
 public:
  template <typename S>
  void run_column_sum(Operand<S>& x, Operand<float>& sum, const RowsByWidth& s, bool accumulate) {
    Operand<float> workspace(*this, column_sum_workspace(s.rows, s.width));
    GW_RUN_BOTH(column_sum, [&](auto on) {
      return ColumnSum{.x = on(x),
                       .sum = on(sum),
                       .workspace = on(workspace),
                       .rows = s.rows,
                       .width = s.width,
                       .accumulate = accumulate};
    });
  }
  std::vector<float> sum_columns(const std::vector<float>& values, const std::vector<float>& start,
                                 const RowsByWidth& s, bool accumulate) {
    Operand<float> x(*this, values), sum(*this, start);
    run_column_sum(x, sum, s, accumulate);
    return sum.got();
  }
  template <typename S>
  void check_column_sum(const RowsByWidth& s, int64_t misalign, bool accumulate) {
    Operand<S> x(*this, normal(s.size(), 4), misalign);
    Operand<float> sum(*this, normal(s.width, 5));
    run_column_sum(x, sum, s, accumulate);
    sum.expect_close("sum", 1e-6, sum_scale(s.rows));
  }
  // Compares `sums` with the reference's sums of the same partial sums, added to `start`.
  void expect_reference_sums(PartialSums of, const std::vector<float>& partial, std::vector<float> start,
                             const std::vector<float>& sums) {
    of.partial = partial.data();
    of.sums = {start.data()};
    reference::combine_sums({{of}});
    expect_close(sums, start, 1e-6, "sums of partial sums", 4.0);
  }
};

TEST_P(VitBias, ColumnSumMatchesTheDoubleReference) {
  for_shapes(kShapes, [&](const RowsByWidth& s, int64_t misalign) {
    for (bool accumulate : {false, true}) {
      check_column_sum<float>(s, misalign, accumulate);
      check_column_sum<Bf16>(s, misalign, accumulate);
    }
  });
}

TEST_P(VitBias, ColumnSumCountsEveryRowOnce) {
  // Sums of small integers are exact, so one row too many or too few changes the sum.
  for (int64_t rows : {1, 15, 16, 17, 31, 33, 255, 256, 257, 4095, 4097, 8193}) {
    const RowsByWidth s{rows, 5};
    std::vector<float> x(s.size()), want(5, 0.0f);
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = static_cast<float>((i * 7919) % 64);
      want[i % 5] += x[i];
    }
    expect_same_bits(sum_columns(x, std::vector<float>(5, -1.0f), s, false), want,
                     fmt::format("{} rows", rows));
  }
}

// Tests a batch of arrays at a constant stride with other data in between, like the arrays of a model's
// layers.
TEST_P(VitBias, PartialSumsOfABatchMatchThoseOfEachArray) {
  for (const RowsByWidth& s : kShapes) {
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
      for (int64_t i = 0; i < kBatch; ++i) combine.of[i] = batch.sums(i, sums.data() + i * s.width);
      GW_RUN(combine_sums, combine);
      all.expect_guards_intact("workspace");
      sums.expect_guards_intact("sums");
      const auto values = x.host(), start = normal(kBatch * s.width, 9), got = sums.host();
      for (int64_t i = 0; i < kBatch; ++i) {
        auto part = [i](const std::vector<float>& of, int64_t at, int64_t count) {
          return std::vector<float>(of.begin() + i * at, of.begin() + i * at + count);
        };
        const auto want = sum_columns(part(values, stride, s.size()), part(start, s.width, s.width), s, true);
        expect_close(part(got, s.width, s.width), want, 1e-6, fmt::format("sum {}", i), sum_scale(s.rows));
      }
    }
  }
}

TEST_P(VitBias, ColumnSumHasTheSameBitsForAnyNumberOfThreads) {
  const RowsByWidth s{3000, 70};
  expect_same_bits_with_any_threads(
      [&] { return Arrays{sum_columns(normal(s.size(), 6), normal(s.width, 7), s, false)}; });
}

// Combines sums of different widths, with an unused sum in between.
TEST_P(VitBias, CombinedSumsMatchSeparateOnesBitForBit) {
  const int64_t rows = 50, width = 72, wide = 136;
  auto x = array(normal(rows * width, 1)), dy = array(normal(rows * width, 2)),
       gamma = array(normal(width, 3));
  auto mean = array(normal(rows, 4)), rstd = array(normal(rows, 5)), pre = array(normal(rows * wide, 6));
  const auto start = normal(wide, 7);
  // Returns the gradients. `together`: one combined op adds up the partial sums of all ops; otherwise each op
  // adds up its partial sums.
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
    if (together) expect_reference_sums(gelu.sums(), gelu_workspace.host(), start, d_bias.host());
    return Arrays{d_gamma.host(), d_beta.host(), d_bias.host()};
  };
  const Arrays together = sums(true), separate = sums(false);
  for (size_t i = 0; i < together.size(); ++i) expect_same_bits(together[i], separate[i], "sums");
}

// Tests few rows, which need no first stage. The second stage reads BF16 rows without a conversion.
TEST_P(VitBias, SecondStageAddsUpFewRowsOfEitherType) {
  for (int64_t rows : {int64_t{0}, int64_t{1}, int64_t{33}, kMaxChunks}) {
    for (bool accumulate : {false, true}) {
      SCOPED_TRACE(fmt::format("{} rows, accumulate {}", rows, accumulate));
      constexpr int64_t kWidth = 37;
      Operand<float> x(*this, normal(rows * kWidth, 3)), sums(*this, normal(kWidth, 4)),
          sums_bf16(*this, normal(kWidth, 4));
      Operand<Bf16> x_bf16(*this, x.host);
      auto args = [&](auto on, auto& of, auto& to) {
        return ColumnSum{.x = on(of), .sum = on(to), .rows = rows, .width = kWidth, .accumulate = accumulate};
      };
      const OnDevice device;
      const CombineSums combine{{args(device, x, sums).of_rows(), args(device, x_bf16, sums_bf16).of_rows()}};
      GW_RUN(combine_sums, combine);
      reference::column_sum(args(OnHost{}, x, sums));
      reference::column_sum(args(OnHost{}, x_bf16, sums_bf16));
      sums.expect_close("sums", 1e-6, sum_scale(rows));
      sums_bf16.expect_close("sums of BF16", 1e-6, sum_scale(rows));
    }
  }
}

GW_INSTANTIATE_BACKENDS(VitBias);

}  // namespace
}  // namespace gradwire::testing
