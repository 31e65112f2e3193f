#include <fmt/format.h>

#include <functional>

#include "kernels/math/gelu.h"
#include "kernels/vit/gelu.h"
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

const std::vector<Shape> kShapes = {{0, 128},  {1, 1},    {5, 7},    {9, 31},   {64, 32},
                                    {3, 33},   {70, 127}, {17, 128}, {16, 129}, {15, 256},
                                    {300, 68}, {2, 1023}, {3, 1024}, {2, 4099}};

struct Backward {
  std::vector<float> dy, d_bias;
};

// Evaluates the formulas literally, including their cancellation.
double phi(double x, Gelu form) {
  if (form == Gelu::exact) return 0.5 * std::erfc(-x / std::sqrt(2.0));
  return 0.5 * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
}
double derivative(double x, Gelu form) {
  if (form == Gelu::exact) return phi(x, form) + x * std::exp(-0.5 * x * x) / std::sqrt(2.0 * M_PI);
  const double t = 2.0 * phi(x, form) - 1.0;
  return phi(x, form) + 0.5 * x * (1.0 - t * t) * std::sqrt(2.0 / M_PI) * (1.0 + 3.0 * 0.044715 * x * x);
}

Backward reference_backward(const std::vector<float>& pre, Backward g, const Shape& s, bool accumulate,
                            Gelu form) {
  reference::bias_gelu_backward({.pre = pre.data(),
                                 .dy = g.dy.data(),
                                 .d_pre = g.dy.data(),
                                 .d_bias = g.d_bias.data(),
                                 .rows = s.rows,
                                 .width = s.width,
                                 .accumulate = accumulate,
                                 .form = form});
  return g;
}

enum class Out { dy, pre, other };  // where backward writes

// Runs bias_gelu_backward of type S on a backend, with or without sums.
template <typename S, typename Test>
std::vector<S> d_pre_of(Test& test, Gelu form, const Shape& s, int64_t misalign, bool sums) {
  auto operands = [&](uint32_t seed) {
    std::vector<S> out;
    for (float v : test.normal(s.size(), seed, 2.0f)) out.push_back(narrow<S>(v));
    return out;
  };
  auto pre = test.array(operands(21), misalign), dy = test.array(operands(22), misalign);
  auto d_pre = test.template array<S>(s.size(), misalign);
  auto d_bias = test.template array<float>(s.width),
       workspace = test.template array<float>(column_sum_workspace(s.rows, s.width));
  test.run(BiasGeluBackward<S>{.pre = pre.data(),
                               .dy = dy.data(),
                               .d_pre = d_pre.data(),
                               .d_bias = sums ? d_bias.data() : nullptr,
                               .workspace = sums ? workspace.data() : nullptr,
                               .rows = s.rows,
                               .width = s.width,
                               .form = form});
  d_pre.expect_guards_intact("d_pre");
  return d_pre.host();
}

class VitGelu : public OpTest {
 public:
  void in_each_form(const std::function<void()>& check) {
    for (Gelu which : {Gelu::exact, Gelu::tanh}) {
      SCOPED_TRACE(which == Gelu::exact ? "exact" : "tanh");
      form = which;
      check();
    }
  }
  // Relative to any value, however small: in the tanh form, exp's argument, up to 70 here, is rounded.
  double tolerance() const { return form == Gelu::exact ? 5e-7 : 8e-6; }
  std::vector<float> reference_forward(std::vector<float>& x, const std::vector<float>& bias,
                                       const Shape& s) {
    std::vector<float> y(x.size());
    reference::bias_gelu(
        {.x = x.data(), .bias = bias.data(), .y = y.data(), .rows = s.rows, .width = s.width, .form = form});
    return y;
  }

  // {pre, y}
  std::vector<std::vector<float>> forward(const std::vector<float>& x_values,
                                          const std::vector<float>& bias_values, const Shape& s,
                                          int64_t misalign = 0) {
    auto x = array(x_values, misalign), bias = array(bias_values, misalign),
         y = array<float>(s.size(), misalign);
    BiasGelu args{
        .x = x.data(), .bias = bias.data(), .y = y.data(), .rows = s.rows, .width = s.width, .form = form};
    GW_RUN(bias_gelu, args);
    x.expect_guards_intact("x");
    y.expect_guards_intact("y");
    return {x.host(), y.host()};
  }
  Backward backward(const std::vector<float>& pre_values, const Backward& g, const Shape& s, bool accumulate,
                    int64_t misalign = 0, Out to = Out::dy) {
    auto pre = array(pre_values, misalign), dy = array(g.dy, misalign), d_bias = array(g.d_bias);
    auto other = array<float>(s.size(), misalign);
    auto workspace = array<float>(column_sum_workspace(s.rows, s.width));
    auto& out = to == Out::dy ? dy : to == Out::pre ? pre : other;
    BiasGeluBackward args{.pre = pre.data(),
                          .dy = dy.data(),
                          .d_pre = out.data(),
                          .d_bias = d_bias.data(),
                          .workspace = workspace.data(),
                          .rows = s.rows,
                          .width = s.width,
                          .accumulate = accumulate,
                          .form = form};
    GW_RUN(bias_gelu_backward, args);
    out.expect_guards_intact("d_pre");
    d_bias.expect_guards_intact("d_bias");
    workspace.expect_guards_intact("workspace");
    return {out.host(), d_bias.host()};
  }

  template <typename S>
  void run(const BiasGeluBackward<S>& args) {
    GW_RUN(bias_gelu_backward, args);
  }

  Gelu form = Gelu::exact;
};

// Returns finely spaced values from -12 to 12: GELU's whole range, including tails.
std::vector<float> sweep(int64_t count) {
  std::vector<float> x(static_cast<size_t>(count));
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(-12.0 + 24.0 * static_cast<double>(i) / static_cast<double>(count - 1));
  }
  return x;
}

TEST_P(VitGelu, ForwardMatchesTheDoubleReferenceAndKeepsThePreActivation) {
  in_each_form([&] {
    for (const Shape& shape : kShapes) {
      auto x = normal(shape.size(), 1, 2.0f), bias = normal(shape.width, 2);
      auto pre = x;
      const auto y = reference_forward(pre, bias, shape);
      for (int64_t misalign : {0, 1}) {
        SCOPED_TRACE(fmt::format("{} misaligned by {}", shape.name(), misalign));
        auto got = forward(x, bias, shape, misalign);
        expect_same_bits(got[0], pre, "pre");
        expect_close(got[1], y, tolerance(), "y", form == Gelu::exact ? 0.0 : 1e-30);  // exp flushes to 0
      }
    }
  });
}

TEST_P(VitGelu, IsExactToFloatAccuracyFromMinus12To12) {
  Shape shape{1, 20001};
  auto x = sweep(shape.width);
  std::vector<float> zero(x.size(), 0.0f);
  in_each_form([&] {
    auto got = forward(x, zero, shape)[1];
    for (size_t i = 0; i < x.size(); ++i) {
      // The exact form is accurate relatively to its value. The tails of the tanh form cancel, so it is
      // accurate absolutely.
      const double want = x[i] * phi(x[i], form);
      const double size = form == Gelu::exact ? std::abs(want) : std::max(0.1, std::abs(want));
      ASSERT_NEAR(got[i], want, 5e-7 * size) << "at " << x[i];
    }
  });
}

TEST_P(VitGelu, DerivativeIsExactToFloatAccuracyFromMinus12To12) {
  Shape shape{1, 20001};
  auto x = sweep(shape.width);
  Backward in{std::vector<float>(x.size(), 1.0f), std::vector<float>(x.size(), 0.0f)};
  in_each_form([&] {
    auto got = backward(x, in, shape, false).dy;
    for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(got[i], derivative(x[i], form), 4e-7) << "at " << x[i];
  });
}

TEST_P(VitGelu, FarTailsAreTheIdentityAndZeroAndNanPropagates) {
  std::vector<float> x = {30.0f, 1e30f, -30.0f, -1e30f, std::numeric_limits<float>::quiet_NaN(), 0.0f};
  Shape shape{1, 6};
  in_each_form([&] {
    auto got = forward(x, std::vector<float>(6, 0.0f), shape)[1];
    EXPECT_EQ(got[0], 30.0f);
    EXPECT_EQ(got[1], 1e30f);
    EXPECT_EQ(got[2], 0.0f);
    EXPECT_EQ(got[3], 0.0f);
    EXPECT_TRUE(std::isnan(got[4]));
    EXPECT_EQ(got[5], 0.0f);
    Backward in{std::vector<float>(6, 1.0f), std::vector<float>(6, 0.0f)};
    auto d = backward(x, in, shape, false).dy;
    EXPECT_EQ(d[0], 1.0f);
    EXPECT_EQ(d[1], 1.0f);
    EXPECT_EQ(d[2], 0.0f);
    EXPECT_EQ(d[3], 0.0f);
    EXPECT_TRUE(std::isnan(d[4]));
    EXPECT_NEAR(d[5], 0.5f, 1e-7f);
  });
}

TEST_P(VitGelu, BackwardMatchesTheDoubleReferenceWithAndWithoutAccumulation) {
  in_each_form([&] {
    for (const Shape& shape : kShapes) {
      auto pre = normal(shape.size(), 3, 2.0f);
      Backward in{normal(shape.size(), 4), normal(shape.width, 5)};
      for (bool accumulate : {false, true}) {
        SCOPED_TRACE(shape.name() + (accumulate ? " accumulating" : ""));
        auto want = reference_backward(pre, in, shape, accumulate, form);
        auto got = backward(pre, in, shape, accumulate, accumulate ? 1 : 0);
        expect_close(got.dy, want.dy, 2e-6, "dy");
        expect_close(got.d_bias, want.d_bias, 2e-6, "d_bias",
                     std::sqrt(1.0 + static_cast<double>(shape.rows)));
      }
    }
  });
}

TEST_P(VitGelu, BackwardHasTheSameBitsInPlaceAndOutOfPlace) {
  in_each_form([&] {
    for (const Shape& shape : kShapes) {
      auto pre = normal(shape.size(), 13, 2.0f);
      Backward in{normal(shape.size(), 14), normal(shape.width, 15)};
      for (int64_t misalign : {0, 1}) {
        SCOPED_TRACE(fmt::format("{} misaligned by {}", shape.name(), misalign));
        const auto want = backward(pre, in, shape, true, misalign);
        for (Out to : {Out::pre, Out::other}) {
          const auto got = backward(pre, in, shape, true, misalign, to);
          expect_same_bits(got.dy, want.dy, "d_pre");
          expect_same_bits(got.d_bias, want.d_bias, "d_bias");
        }
      }
    }
  });
}

TEST_P(VitGelu, BackwardWithoutAWorkspaceWritesTheSameGradientAndNoSums) {
  in_each_form([&] {
    for (const Shape& shape : kShapes) {
      for (int64_t misalign : {0, 1}) {
        SCOPED_TRACE(fmt::format("{} misaligned by {}", shape.name(), misalign));
        expect_same_bits(d_pre_of<float>(*this, form, shape, misalign, false),
                         d_pre_of<float>(*this, form, shape, misalign, true), "d_pre");
        const auto got = d_pre_of<Bf16>(*this, form, shape, misalign, false),
                   want = d_pre_of<Bf16>(*this, form, shape, misalign, true);
        for (size_t i = 0; i < want.size(); ++i) ASSERT_EQ(got[i].bits, want[i].bits) << i;
      }
    }
  });
}

TEST_P(VitGelu, BackwardIsTheDerivativeOfForward) {
  Shape shape{4, 9};
  auto x = normal(shape.size(), 6), bias = normal(shape.width, 7), dy = normal(shape.size(), 8);
  auto forward_reference = [&] {
    auto pre = x;
    return reference_forward(pre, bias, shape);
  };
  auto pre = x;
  for (size_t i = 0; i < pre.size(); ++i) pre[i] += bias[i % 9];
  in_each_form([&] {
    auto got = backward(pre, {dy, std::vector<float>(9, 0.0f)}, shape, false);
    auto loss = [&] { return dot(forward_reference(), dy); };
    for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(got.dy[i], central_difference(x, i, loss), 2e-4) << i;
    for (size_t i = 0; i < bias.size(); ++i)
      EXPECT_NEAR(got.d_bias[i], central_difference(bias, i, loss), 5e-4) << i;
  });
}

TEST_P(VitGelu, RepeatedRunsAndAnyNumberOfThreadsGiveTheSameBits) {
  Shape shape{1100, 128};
  auto pre = normal(shape.size(), 9), bias = normal(shape.width, 10);
  Backward in{normal(shape.size(), 11), normal(shape.width, 12)};
  const int before = host_threads();
  in_each_form([&] {
    auto first = backward(pre, in, shape, false);
    auto y = forward(pre, bias, shape)[1];
    for (int threads : thread_counts()) {
      set_host_threads(threads);
      auto again = backward(pre, in, shape, false);
      expect_same_bits(again.dy, first.dy, "dy");
      expect_same_bits(again.d_bias, first.d_bias, "d_bias");
      expect_same_bits(forward(pre, bias, shape)[1], y, "y");
    }
    set_host_threads(before);
  });
}

GW_INSTANTIATE_BACKENDS(VitGelu);

// The cost of the approximation: GELU itself is off by at most 5e-4, near |x| = 2.3.
TEST(GeluTanh, IsWithinFiveTenThousandthsOfTheExactForm) {
  double worst = 0.0;
  for (double x = -12.0; x < 12.0; x += 0.001)
    worst = std::max(worst, std::abs(x * (phi(x, Gelu::tanh) - phi(x, Gelu::exact))));
  EXPECT_LT(worst, 5e-4);
  EXPECT_GT(worst, 4e-4);
}

TEST(NormalAt, MatchesErfcRelativelyInBothTails) {
  for (float x = -13.0f; x < 13.0f; x += 0.000371f) {
    double cdf = 0.5 * std::erfc(-static_cast<double>(x) / std::sqrt(2.0));
    double density = std::exp(-0.5 * static_cast<double>(x) * x) / std::sqrt(2.0 * M_PI);
    Normal n = normal_at(x);
    ASSERT_NEAR(n.cdf, cdf, 5e-7 * cdf) << x;
    ASSERT_NEAR(n.density, density, 3e-7 * density) << x;
  }
}

}  // namespace
}  // namespace gradwire::testing
