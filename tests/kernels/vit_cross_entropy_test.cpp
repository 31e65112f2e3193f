#include <fmt/format.h>

#include "kernels/vit/cross_entropy.h"
#include "runtime/threads/thread_pool.h"
#include "tests/kernels/backend.h"
#include "tests/kernels/compare.h"

namespace gradwire::testing {
namespace {

struct Result {
  std::vector<float> d_logits;
  std::vector<double> totals;
};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class VitCrossEntropy : public OpTest {
 public:
  enum Gradient { separate, in_place, none };
  Result run(const std::vector<float>& logit_values, const std::vector<int32_t>& label_values,
             int64_t classes, float grad_scale, Gradient gradient = separate,
             std::vector<double> start = {0.0, 0.0}, int64_t misalign = 0, bool accumulate = true) {
    auto rows = static_cast<int64_t>(label_values.size());
    auto logits = array(logit_values, misalign), d_logits = array<float>(rows * classes, misalign);
    auto labels = array(label_values);
    auto totals = array(start);
    auto workspace = array<float>(2 * rows);
    Array<float>& out = gradient == in_place ? logits : d_logits;
    CrossEntropy args{.logits = logits.data(),
                      .labels = labels.data(),
                      .d_logits = gradient == none ? nullptr : out.data(),
                      .totals = totals.data(),
                      .workspace = workspace.data(),
                      .rows = rows,
                      .classes = classes,
                      .grad_scale = grad_scale,
                      .accumulate = accumulate};
    GW_RUN(cross_entropy, args);
    out.expect_guards_intact("d_logits");
    totals.expect_guards_intact("totals");
    workspace.expect_guards_intact("workspace");
    return {gradient == none ? std::vector<float>{} : out.host(), totals.host()};
  }
};

Result reference_run(const std::vector<float>& logits, const std::vector<int32_t>& labels, int64_t classes,
                     float grad_scale, std::vector<double> start = {0.0, 0.0}) {
  Result want{std::vector<float>(logits.size()), std::move(start)};
  reference::cross_entropy({.logits = logits.data(),
                            .labels = labels.data(),
                            .d_logits = want.d_logits.data(),
                            .totals = want.totals.data(),
                            .rows = static_cast<int64_t>(labels.size()),
                            .classes = classes,
                            .grad_scale = grad_scale});
  return want;
}

std::vector<int32_t> some_labels(int64_t rows, int64_t classes) {
  std::vector<int32_t> labels(static_cast<size_t>(rows));
  for (size_t i = 0; i < labels.size(); ++i)
    labels[i] = static_cast<int32_t>((i * 31 + 7) % static_cast<size_t>(classes));
  return labels;
}

TEST_P(VitCrossEntropy, MatchesTheDoubleReference) {
  for (auto [rows, classes] : std::vector<std::pair<int64_t, int64_t>>{{0, 10},
                                                                       {1, 1},
                                                                       {1, 10},
                                                                       {64, 10},
                                                                       {7, 31},
                                                                       {9, 33},
                                                                       {5, 1000},
                                                                       {3, 1025},
                                                                       {300, 2},
                                                                       {1030, 10}}) {
    auto logits = normal(rows * classes, 1, 3.0f);
    auto labels = some_labels(rows, classes);
    float scale = 1.0f / static_cast<float>(std::max<int64_t>(1, rows));
    auto want = reference_run(logits, labels, classes, scale, {2.5, 3.0});
    for (auto gradient : {separate, in_place, none}) {
      SCOPED_TRACE(fmt::format("{}x{} gradient {}", rows, classes, static_cast<int>(gradient)));
      auto got = run(logits, labels, classes, scale, gradient, {2.5, 3.0}, gradient == in_place ? 1 : 0);
      EXPECT_NEAR(got.totals[0], want.totals[0], 1e-6 * (1.0 + want.totals[0]));
      EXPECT_EQ(got.totals[1], want.totals[1]);
      if (gradient != none) expect_close(got.d_logits, want.d_logits, 1e-6, "d_logits", scale);
    }
  }
}

TEST_P(VitCrossEntropy, GradientIsTheDerivativeOfTheSummedLoss) {
  auto logits = normal(3 * 7, 2);
  auto labels = some_labels(3, 7);
  auto got = run(logits, labels, 7, 1.0f);
  auto loss = [&] { return reference_run(logits, labels, 7, 1.0f).totals[0]; };
  for (size_t i = 0; i < logits.size(); ++i) {
    EXPECT_NEAR(got.d_logits[i], central_difference(logits, i, loss), 1e-4) << i;
  }
}

TEST_P(VitCrossEntropy, HugeLogitsGiveFiniteLosses) {
  // One class far ahead and correct, one far ahead and wrong, all equal.
  std::vector<float> logits = {3e37f, -3e37f, 0.0f, -1e30f, 1e30f, 0.0f, 1e38f, 1e38f, 1e38f};
  auto got = run(logits, {0, 0, 2}, 3, 1.0f);
  EXPECT_NEAR(got.totals[0] / 2e30, 1.0, 1e-6);
  EXPECT_EQ(got.totals[1], 1.0);  // the first class wins a tie, and the label is the last class
  std::vector<float> want = {0, 0, 0, -1, 1, 0, 1 / 3.0f, 1 / 3.0f, -2 / 3.0f};
  expect_close(got.d_logits, want, 1e-6, "d_logits");
}

TEST_P(VitCrossEntropy, PredictsTheFirstOfEqualLogits) {
  std::vector<float> row = {1.0f, 5.0f, 5.0f, 5.0f, 2.0f};
  for (int32_t label = 0; label < 5; ++label) {
    EXPECT_EQ(run(row, {label}, 5, 1.0f).totals[1], label == 1 ? 1.0 : 0.0) << label;
  }
}

TEST_P(VitCrossEntropy, InvalidLabelsGiveNanLossAndNanGradientsInTheirRowOnly) {
  for (int32_t bad :
       {-1, 5, 1000000, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()}) {
    auto logits = normal(3 * 5, 3);
    auto got = run(logits, {1, bad, 2}, 5, 1.0f);
    EXPECT_TRUE(std::isnan(got.totals[0])) << bad;
    EXPECT_TRUE(std::isfinite(got.totals[1])) << bad;
    for (size_t i = 0; i < 15; ++i) EXPECT_EQ(std::isnan(got.d_logits[i]), i / 5 == 1) << bad << " at " << i;
  }
}

TEST_P(VitCrossEntropy, NanLogitsGiveNanLossAndCountAsWrong) {
  for (int32_t at = 0; at < 5; ++at) {
    std::vector<float> logits = {9.0f, 1.0f, 0.0f, 0.0f, 0.0f};
    logits[static_cast<size_t>(at)] = kNan;
    for (int32_t label = 0; label < 5; ++label) {
      auto got = run(logits, {label}, 5, 1.0f);
      EXPECT_TRUE(std::isnan(got.totals[0])) << at << " " << label;
      EXPECT_EQ(got.totals[1], 0.0) << at << " " << label;
    }
  }
}

TEST_P(VitCrossEntropy, RepeatedRunsAndAnyNumberOfThreadsGiveTheSameBits) {
  auto logits = normal(2500 * 10, 4);
  auto labels = some_labels(2500, 10);
  const int before = host_threads();
  auto first = run(logits, labels, 10, 0.01f);
  for (int threads : thread_counts()) {
    set_host_threads(threads);
    auto again = run(logits, labels, 10, 0.01f);
    EXPECT_EQ(again.totals, first.totals);
    expect_same_bits(again.d_logits, first.d_logits, "d_logits");
  }
  set_host_threads(before);
}

// Numbers of rows below, at and above the limit of one launch, and none.
TEST_P(VitCrossEntropy, OverwritesTotalsUnlessAccumulating) {
  constexpr int64_t kClasses = 3, kMost = CrossEntropy<float>::kOneBlock;
  for (int64_t rows : {int64_t{0}, int64_t{1}, kMost - 1, kMost, kMost + 1}) {
    SCOPED_TRACE(fmt::format("{} rows", rows));
    const auto logits = normal(rows * kClasses, 5);
    const auto labels = some_labels(rows, kClasses);
    const Result want = reference_run(logits, labels, kClasses, 1.0f);
    const Result got = run(logits, labels, kClasses, 1.0f, separate, {kNan, kNan}, 0, false);
    EXPECT_NEAR(got.totals[0], want.totals[0], 1e-5 * (1.0 + want.totals[0]));
    EXPECT_EQ(got.totals[1], want.totals[1]);
    expect_close(got.d_logits, want.d_logits, 1e-5, "d_logits");
  }
}

GW_INSTANTIATE_BACKENDS(VitCrossEntropy);

}  // namespace
}  // namespace gradwire::testing
