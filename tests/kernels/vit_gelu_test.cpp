#include <fmt/format.h>

#include <functional>

#include "kernels/math/gelu.h"
#include "kernels/vit/elementwise.h"
#include "tests/kernels/operand.h"

namespace gradwire::testing {
namespace {

const std::vector<RowsByWidth> kShapes = {{0, 128},  {1, 1},    {5, 7},    {9, 31},   {64, 32},  {3, 33},
                                          {70, 127}, {17, 128}, {16, 129}, {15, 256}, {300, 68}, {2, 1023},
                                          {3, 1024}, {2, 4099}, {6, 72},   {2, 1032}};

// Evaluates the formulas literally, including cancellation.
double phi(double x, Gelu form) {
  if (form == Gelu::exact) return 0.5 * std::erfc(-x / std::sqrt(2.0));
  return 0.5 * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
}
double derivative(double x, Gelu form) {
  if (form == Gelu::exact) return phi(x, form) + x * std::exp(-0.5 * x * x) / std::sqrt(2.0 * M_PI);
  const double t = 2.0 * phi(x, form) - 1.0;
  return phi(x, form) + 0.5 * x * (1.0 - t * t) * std::sqrt(2.0 / M_PI) * (1.0 + 3.0 * 0.044715 * x * x);
}

enum class Out { dy, pre, other };  // output array of the backward pass

// The operands of the backward pass.
template <typename S>
struct Backward {
  Operand<S> pre, dy, other;
  Operand<float> d_bias;

  Backward(OpFixture& test, const RowsByWidth& s, uint32_t seed, int64_t misalign)
      : Backward(test, normal(s.size(), seed, 2.0f), normal(s.size(), seed + 1), normal(s.width, seed + 2),
                 misalign) {}
  Backward(OpFixture& test, const std::vector<float>& pre_values, const std::vector<float>& dy_values,
           const std::vector<float>& d_bias_values, int64_t misalign = 0)
      : pre(test, pre_values, misalign),
        dy(test, dy_values, misalign),
        other(test, std::ssize(dy_values), misalign),
        d_bias(test, d_bias_values) {}
  Operand<S>& d_pre(Out to) { return to == Out::dy ? dy : to == Out::pre ? pre : other; }
};

class VitGelu : public OpTest {
 public:
  void in_each_form(const std::function<void()>& check) {
    for (Gelu which : {Gelu::exact, Gelu::tanh}) {
      SCOPED_TRACE(which == Gelu::exact ? "exact" : "tanh");
      form = which;
      check();
    }
  }
  // Returns the tolerance relative to a value, however small. In the tanh form, exp's argument, up to 70
  // here, is rounded.
  double tolerance() const { return form == Gelu::exact ? 5e-7 : 8e-6; }

  template <typename S>
  void run(Operand<S>& x, Operand<S>& y, const RowsByWidth& s) {
    GW_RUN_BOTH(bias_gelu, [&](auto on) {
      return BiasGelu{.x = on(x), .y = on(y), .rows = s.rows, .width = s.width, .form = form};
    });
  }
  template <typename S>
  void run(Backward<S>& b, const RowsByWidth& s, bool accumulate, Out to = Out::dy, bool sums = true) {
    Operand<float> workspace(*this, column_sum_workspace(s.rows, s.width));
    GW_RUN_BOTH(bias_gelu_backward, [&](auto on) {
      return BiasGeluBackward{.pre = on(b.pre),
                              .dy = on(b.dy),
                              .d_pre = on(b.d_pre(to)),
                              .d_bias = sums ? on(b.d_bias) : nullptr,
                              .workspace = sums ? on(workspace) : nullptr,
                              .rows = s.rows,
                              .width = s.width,
                              .accumulate = accumulate,
                              .form = form};
    });
  }
  // Returns GELU of one row of values. slope() returns GELU's derivative.
  std::vector<float> gelu(const std::vector<float>& values) {
    Operand<float> x(*this, values), y(*this, x.device.size());
    run(x, y, {1, x.device.size()});
    return y.got();
  }
  std::vector<float> slope(const std::vector<float>& values) {
    Backward<float> b(*this, values, std::vector<float>(values.size(), 1.0f), values);
    run(b, {1, std::ssize(values)}, false);
    return b.dy.got();
  }

  template <typename S>
  void check_forward(const RowsByWidth& s, int64_t misalign) {
    Operand<S> x(*this, normal(s.size(), 1, 2.0f), misalign), y(*this, s.size(), misalign);
    run(x, y, s);
    y.expect_rounded("y", tolerance(), form == Gelu::exact ? 0.0 : 1e-30);  // exp flushes to 0
    run(x, x, s);
    expect_same_bits(x.got(), y.got(), "y in place");
  }
  template <typename S>
  void check_backward(const RowsByWidth& s, int64_t misalign, bool accumulate) {
    Backward<S> b(*this, s, 3, misalign);
    run(b, s, accumulate);
    b.dy.expect_rounded("dy", 2e-6, 1.0);
    const double size = std::sqrt(1.0 + static_cast<double>(s.rows));
    if constexpr (std::is_same_v<S, float>)
      b.d_bias.expect_close("d_bias", 2e-6, size);
    else
      b.d_bias.expect_close("d_bias", 3e-6, std::max(6.0, size));  // the sums are computed before rounding
  }
  template <typename S>
  void check_without_sums(const RowsByWidth& s, int64_t misalign) {
    Backward<S> with(*this, s, 21, misalign), without(*this, s, 21, misalign);
    run(with, s, false, Out::other, true);
    run(without, s, false, Out::other, false);
    expect_same_bits(without.other.got(), with.other.got(), "d_pre");
  }

  Gelu form = Gelu::exact;
};

TEST_P(VitGelu, ForwardMatchesTheDoubleReferenceAlsoInPlace) {
  in_each_form([&] {
    for_shapes(kShapes, [&](const RowsByWidth& s, int64_t misalign) {
      check_forward<float>(s, misalign);
      check_forward<Bf16>(s, misalign);
    });
  });
}

// Tests finely spaced values in GELU's whole range, including the tails.
TEST_P(VitGelu, IsExactToFloatAccuracyFromMinus12To12) {
  std::vector<float> x;
  for (int i = 0; i <= 20000; ++i) x.push_back(static_cast<float>(-12.0 + 24.0 * i / 20000));
  in_each_form([&] {
    const auto y = gelu(x), d = slope(x);
    for (size_t i = 0; i < x.size(); ++i) {
      // The exact form is accurate relative to its value. The tails of the tanh form cancel, so the tanh form
      // has only absolute accuracy.
      const double want = x[i] * phi(x[i], form);
      const double size = form == Gelu::exact ? std::abs(want) : std::max(0.1, std::abs(want));
      ASSERT_NEAR(y[i], want, 5e-7 * size) << "at " << x[i];
      ASSERT_NEAR(d[i], derivative(x[i], form), 4e-7) << "at " << x[i];
    }
  });
}

// Expects the nearest BF16 value, or its neighbour if the exact result is almost halfway between both. Tests
// every operand from 2^-10 to 9, of either sign, including tails.
TEST_P(VitGelu, RoundsEveryBf16OperandToNearest) {
  std::vector<float> all;
  for (uint16_t bits = 0x3a80; bits <= 0x4110; ++bits) {
    all.push_back(widen(Bf16{bits}));
    all.push_back(-all.back());
  }
  const RowsByWidth s{1, std::ssize(all)};
  in_each_form([&] {
    Operand<Bf16> x(*this, all), y(*this, s.width);
    run(x, y, s);
    Backward<Bf16> b(*this, all, std::vector<float>(all.size(), 1.0f), all);
    run(b, s, false);
    const auto got = y.got(), got_slope = b.dy.got();
    for (size_t i = 0; i < all.size(); ++i) {
      const double v = all[i], root = std::sqrt(2.0 / M_PI);
      double cdf = 0.5 * std::erfc(-v / std::sqrt(2.0)), density = 0.5 * root * std::exp(-0.5 * v * v);
      if (form == Gelu::tanh) {
        const double e = std::exp(-2.0 * root * (v + 0.044715 * v * v * v));
        cdf = 1.0 / (1.0 + e);
        density = 2.0 * root * (1.0 + 0.134145 * v * v) * e * cdf * cdf;
      }
      const auto half_unit = [](double value) { return std::ldexp(1.0, std::ilogb(value) - 8); };
      ASSERT_NEAR(got[i], v * cdf, half_unit(v * cdf) + 1e-5 * std::abs(v * cdf)) << "at " << v;
      // The tolerance is absolute, because the slope is a difference of two terms where it changes sign.
      ASSERT_NEAR(got_slope[i], cdf + v * density,
                  half_unit(cdf + v * density) + 1e-5 * (cdf + std::abs(v) * density))
          << "at " << v;
    }
  });
}

TEST_P(VitGelu, FarTailsAreTheIdentityAndZeroAndNanPropagates) {
  const std::vector<float> x = {30.0f, 1e30f, -30.0f, -1e30f, 0.0f, std::numeric_limits<float>::quiet_NaN()};
  in_each_form([&] {
    auto y = gelu(x), d = slope(x);
    EXPECT_TRUE(std::isnan(y.back()));
    EXPECT_TRUE(std::isnan(d.back()));
    y.pop_back(), d.pop_back();
    EXPECT_EQ(y, (std::vector<float>{30.0f, 1e30f, 0.0f, 0.0f, 0.0f}));
    EXPECT_NEAR(d.back(), 0.5f, 1e-7f);
    d.pop_back();
    EXPECT_EQ(d, (std::vector<float>{1.0f, 1.0f, 0.0f, 0.0f}));
  });
}

TEST_P(VitGelu, BackwardMatchesTheDoubleReferenceWithAndWithoutAccumulation) {
  in_each_form([&] {
    for_shapes(kShapes, [&](const RowsByWidth& s, int64_t misalign) {
      for (bool accumulate : {false, true}) {
        check_backward<float>(s, misalign, accumulate);
        check_backward<Bf16>(s, misalign, accumulate);
      }
    });
  });
}

TEST_P(VitGelu, BackwardHasTheSameBitsInPlaceAndOutOfPlace) {
  in_each_form([&] {
    for_shapes(kShapes, [&](const RowsByWidth& s, int64_t misalign) {
      Backward<float> want(*this, s, 13, misalign);
      run(want, s, true);
      for (Out to : {Out::pre, Out::other}) {
        Backward<float> b(*this, s, 13, misalign);
        run(b, s, true, to);
        expect_same_bits(b.d_pre(to).got(), want.dy.got(), "d_pre");
        expect_same_bits(b.d_bias.got(), want.d_bias.got(), "d_bias");
      }
    });
  });
}

TEST_P(VitGelu, BackwardWithoutAWorkspaceWritesTheSameGradientAndNoSums) {
  in_each_form([&] {
    for_shapes(kShapes, [&](const RowsByWidth& s, int64_t misalign) {
      check_without_sums<float>(s, misalign);
      check_without_sums<Bf16>(s, misalign);
    });
  });
}

TEST_P(VitGelu, BackwardIsTheDerivativeOfForward) {
  const RowsByWidth s{4, 9};
  auto x = normal(s.size(), 6), bias = normal(s.width, 7);
  const auto dy = normal(s.size(), 8);
  in_each_form([&] {
    auto pre = x;
    std::vector<float> y(x.size());
    auto loss = [&] {
      for (size_t i = 0; i < x.size(); ++i) pre[i] = x[i] + bias[i % bias.size()];
      reference::bias_gelu(
          BiasGelu{.x = pre.data(), .y = y.data(), .rows = s.rows, .width = s.width, .form = form});
      return dot(y, dy);
    };
    loss();
    Backward<float> b(*this, pre, dy, bias);
    run(b, s, false);
    const auto got = b.dy.got(), got_bias = b.d_bias.got();
    for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(got[i], central_difference(x, i, loss), 2e-4) << i;
    for (size_t i = 0; i < bias.size(); ++i)
      EXPECT_NEAR(got_bias[i], central_difference(bias, i, loss), 5e-4) << i;
  });
}

TEST_P(VitGelu, RepeatedRunsAndAnyNumberOfThreadsGiveTheSameBits) {
  const RowsByWidth s{1100, 128};
  in_each_form([&] {
    expect_same_bits_with_any_threads([&] {
      Backward<float> b(*this, s, 9, 0);
      Operand<float> x(*this, b.pre.host), y(*this, s.size());
      run(x, y, s);
      run(b, s, false);
      return Arrays{y.got(), b.dy.got(), b.d_bias.got()};
    });
  });
}

GW_INSTANTIATE_BACKENDS(VitGelu);

// Bounds the error of the tanh approximation: GELU is off by at most 5e-4, near |x| = 2.3.
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
