#include "kernels/vit/softmax.h"
#include "tests/kernels/operand.h"

namespace gradwire::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
using Totals = std::vector<double>;

struct Result {
  std::vector<float> d_logits;
  Totals totals;
};

std::vector<int32_t> some_labels(int64_t rows, int64_t classes) {
  std::vector<int32_t> labels(rows);
  for (size_t i = 0; i < labels.size(); ++i)
    labels[i] = static_cast<int32_t>((i * 31 + 7) % static_cast<size_t>(classes));
  return labels;
}

Totals reference_totals(const std::vector<float>& logits, const std::vector<int32_t>& labels,
                        int64_t classes) {
  Totals totals = {0.0, 0.0};
  reference::cross_entropy(CrossEntropy{.logits = logits.data(),
                                        .labels = labels.data(),
                                        .totals = totals.data(),
                                        .rows = std::ssize(labels),
                                        .classes = classes});
  return totals;
}

class VitCrossEntropy : public OpTest {
 public:
  enum Gradient { separate, in_place, none };
  struct How {
    float grad_scale = 1.0f;
    Gradient gradient = separate;
    Totals start = {0.0, 0.0};
    int64_t misalign = 0;
    bool accumulate = true;
    double tolerance = 1e-6;
    bool compares = true;  // whether run() compares with the reference
  };
  template <typename S>
  Result run(const std::vector<float>& logit_values, const std::vector<int32_t>& label_values,
             int64_t classes, const How& how) {
    const auto rows = std::ssize(label_values);
    Operand<float> logits(*this, logit_values, how.misalign), workspace(*this, 2 * rows);
    Operand<S> other(*this, rows * classes, how.misalign);
    Operand<S>& d_logits = [&]() -> Operand<S>& {
      if constexpr (std::is_same_v<S, float>) {
        if (how.gradient == in_place) return logits;
      }
      return other;
    }();
    auto labels = array(label_values);
    auto totals = array(how.start);
    Totals want = how.start;
    auto args = [&](auto on, const int32_t* labels_there, double* totals_there) {
      return CrossEntropy<S>{.logits = on(logits),
                             .labels = labels_there,
                             .totals = totals_there,
                             .workspace = on(workspace),
                             .rows = rows,
                             .classes = classes,
                             .grad_scale = how.grad_scale,
                             .accumulate = how.accumulate};
    };
    CrossEntropy<S> on_device = args(OnDevice{}, labels.data(), totals.data());
    if (how.gradient != none) on_device.d_logits = d_logits.device.data();
    GW_RUN(cross_entropy, on_device);
    totals.expect_guards_intact("totals");
    const Result got{how.gradient == none ? std::vector<float>{} : d_logits.got(), totals.host()};
    if (!how.compares) return got;
    reference::cross_entropy(CrossEntropy<float>{.logits = logits.host.data(),
                                                 .labels = label_values.data(),
                                                 .d_logits = d_logits.host.data(),
                                                 .totals = want.data(),
                                                 .rows = rows,
                                                 .classes = classes,
                                                 .grad_scale = how.grad_scale,
                                                 .accumulate = how.accumulate});
    EXPECT_NEAR(got.totals[0], want[0], how.tolerance * (1.0 + want[0]));
    EXPECT_EQ(got.totals[1], want[1]);
    if (how.gradient != none)
      d_logits.expect_rounded("d_logits", how.tolerance, how.accumulate ? how.grad_scale : 1.0, 1e-7);
    return got;
  }
  // Runs special values without comparing results with the reference.
  Result run(const std::vector<float>& logits, const std::vector<int32_t>& labels, int64_t classes) {
    return run<float>(logits, labels, classes, {.compares = false});
  }
  // Expects a NaN in the row of an invalid label, for numbers of rows that need one launch and two launches.
  template <typename S>
  void expect_nan_in_row_of_invalid_label() {
    constexpr auto kLimits = std::numeric_limits<int32_t>();
    for (int64_t rows : {int64_t{3}, CrossEntropy<S>::kOneBlock + 8}) {
      for (int32_t bad : {-1, 5, 1000000, kLimits.min(), kLimits.max()}) {
        auto labels = some_labels(rows, 5);
        labels[1] = bad;
        const Result got = run<S>(normal(rows * 5, 3), labels, 5, {.compares = false});
        EXPECT_TRUE(std::isnan(got.totals[0])) << bad;
        EXPECT_TRUE(std::isfinite(got.totals[1])) << bad;
        for (size_t i = 0; i < got.d_logits.size(); ++i)
          EXPECT_EQ(std::isnan(got.d_logits[i]), i / 5 == 1) << bad << " at " << i;
      }
    }
  }
};

TEST_P(VitCrossEntropy, MatchesTheDoubleReference) {
  using Size = std::pair<int64_t, int64_t>;
  for (auto [rows, classes] : {Size{0, 10},
                               {1, 1},
                               {1, 10},
                               {64, 10},
                               {7, 31},
                               {9, 33},
                               {5, 1000},
                               {3, 1025},
                               {2, 2052},
                               {34, 1028},
                               {300, 2},
                               {1030, 10},
                               {11, 45},
                               {40, 45}}) {
    const auto logits = normal(rows * classes, 1, 3.0f);
    const auto labels = some_labels(rows, classes);
    const float scale = 1.0f / static_cast<float>(std::max<int64_t>(1, rows));
    for (auto gradient : {separate, in_place, none}) {
      SCOPED_TRACE(fmt::format("{}x{} gradient {}", rows, classes, static_cast<int>(gradient)));
      const How how{scale, gradient, {2.5, 3.0}, gradient == in_place ? 1 : 0};
      run<float>(logits, labels, classes, how);
      if (gradient != in_place) run<Bf16>(logits, labels, classes, how);
    }
  }
}

TEST_P(VitCrossEntropy, GradientIsTheDerivativeOfTheSummedLoss) {
  auto logits = normal(3 * 7, 2);
  auto labels = some_labels(3, 7);
  auto got = run(logits, labels, 7);
  auto loss = [&] { return reference_totals(logits, labels, 7)[0]; };
  for (size_t i = 0; i < logits.size(); ++i) {
    EXPECT_NEAR(got.d_logits[i], central_difference(logits, i, loss), 1e-4) << i;
  }
}

TEST_P(VitCrossEntropy, HugeLogitsGiveFiniteLosses) {
  // In the rows, one class is far ahead and correct, one class is far ahead and wrong, and all classes are
  // equal.
  std::vector<float> logits = {3e37f, -3e37f, 0.0f, -1e30f, 1e30f, 0.0f, 1e38f, 1e38f, 1e38f};
  auto got = run(logits, {0, 0, 2}, 3);
  EXPECT_NEAR(got.totals[0] / 2e30, 1.0, 1e-6);
  EXPECT_EQ(got.totals[1], 1.0);  // the first class wins a tie, and the label is the last class
  std::vector<float> want = {0, 0, 0, -1, 1, 0, 1 / 3.0f, 1 / 3.0f, -2 / 3.0f};
  expect_close(got.d_logits, want, 1e-6, "d_logits");
}

TEST_P(VitCrossEntropy, PredictsTheFirstOfEqualLogits) {
  std::vector<float> row = {1.0f, 5.0f, 5.0f, 5.0f, 2.0f};
  for (int32_t label = 0; label < 5; ++label) {
    EXPECT_EQ(run(row, {label}, 5).totals[1], label == 1 ? 1.0 : 0.0) << label;
  }
}

TEST_P(VitCrossEntropy, InvalidLabelsGiveNanLossAndNanGradientsInTheirRowOnly) {
  expect_nan_in_row_of_invalid_label<float>();
  expect_nan_in_row_of_invalid_label<Bf16>();
}

TEST_P(VitCrossEntropy, NanLogitsGiveNanLossAndCountAsWrong) {
  for (int32_t at = 0; at < 5; ++at) {
    std::vector<float> logits = {9.0f, 1.0f, 0.0f, 0.0f, 0.0f};
    logits[at] = kNan;
    for (int32_t label = 0; label < 5; ++label) {
      auto got = run(logits, {label}, 5);
      EXPECT_TRUE(std::isnan(got.totals[0])) << at << " " << label;
      EXPECT_EQ(got.totals[1], 0.0) << at << " " << label;
    }
  }
}

TEST_P(VitCrossEntropy, RepeatedRunsAndAnyNumberOfThreadsGiveTheSameBits) {
  const auto logits = normal(2500 * 10, 4);
  const auto labels = some_labels(2500, 10);
  const Totals totals = run(logits, labels, 10).totals;
  expect_same_bits_with_any_threads([&] {
    Result got = run(logits, labels, 10);
    EXPECT_EQ(got.totals, totals);
    return Arrays{got.d_logits};
  });
}

// Tests numbers of rows below, at and above the limit of one launch, and zero rows.
TEST_P(VitCrossEntropy, OverwritesTotalsUnlessAccumulating) {
  constexpr int64_t kClasses = 3, kMax = CrossEntropy<float>::kOneBlock;
  for (int64_t rows : {int64_t{0}, int64_t{1}, kMax - 1, kMax, kMax + 1}) {
    SCOPED_TRACE(fmt::format("{} rows", rows));
    run<float>(normal(rows * kClasses, 5), some_labels(rows, kClasses), kClasses,
               {.start = {kNan, kNan}, .accumulate = false, .tolerance = 1e-5});
  }
}

GW_INSTANTIATE_BACKENDS(VitCrossEntropy);

}  // namespace
}  // namespace gradwire::testing
