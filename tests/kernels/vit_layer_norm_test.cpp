#include "kernels/vit/layer_norm.h"
#include "tests/kernels/operand.h"

namespace gradwire::testing {
namespace {

struct Shape {
  int64_t rows, width, stride = 0;
  int64_t x_size() const { return rows == 0 ? 0 : (rows - 1) * (stride != 0 ? stride : width) + width; }
  int64_t y_size() const { return rows * width; }
  std::string name() const { return fmt::format("{}x{} stride {}", rows, width, stride); }

  template <typename Args>
  Args operator()(Args args) const {
    args.rows = rows, args.width = width, args.x_stride = stride;
    return args;
  }
};

// The shapes select each way of holding a row in registers, and include rows too long for registers and
// strided rows.
const std::vector<Shape> kShapes = {
    {0, 64},   {1, 1},   {3, 7},   {5, 31},  {17, 32},  {16, 33},     {64, 64},           {270, 64},
    {33, 127}, {9, 128}, {7, 129}, {5, 256}, {3, 384},  {2, 1023},    {3, 1024},          {2, 1025},
    {4, 3072}, {4, 264}, {6, 72},  {3, 520}, {3, 5000}, {5, 64, 320}, {6, 33, 2 * 33 + 1}};

// The operands of both passes. `mean` and `rstd` are the statistics of x.
template <typename S>
struct Operands {
  Operand<float> x, gamma, beta, mean, rstd;
  Operand<S> y, dy, dx_rounded;
  Operand<float> dx, d_gamma, d_beta, dx_sum;

  Operands(OpFixture& test, const Shape& s, int64_t misalign = 0)
      : Operands(test, s, misalign, inputs(s), normal(s.width, 2), normal(s.width, 3)) {}
  Operands(OpFixture& test, const Shape& s, int64_t misalign, const std::vector<float>& x_values,
           const std::vector<float>& gamma_values, const std::vector<float>& beta_values)
      : x(test, x_values, misalign),
        gamma(test, gamma_values, misalign),
        beta(test, beta_values, misalign),
        mean(test, s.rows),
        rstd(test, s.rows),
        y(test, s.y_size(), misalign),
        dy(test, normal(s.y_size(), 4), misalign),
        dx_rounded(test, s.x_size(), misalign),
        dx(test, normal(s.x_size(), 5), misalign),
        d_gamma(test, normal(s.width, 6)),
        d_beta(test, normal(s.width, 7)),
        dx_sum(test, normal(s.width, 7)) {
    reference::layer_norm(forward(OnHost{}, s));
    mean.device.set(mean.host), rstd.device.set(rstd.host);
  }
  static std::vector<float> inputs(const Shape& s) {
    auto values = normal(s.x_size(), 1, 2.0f);
    for (float& v : values) v += 0.5f;
    return values;
  }
  template <typename Side>
  auto forward(Side on, const Shape& s) {
    return s(LayerNorm{
        .x = on(x), .gamma = on(gamma), .beta = on(beta), .y = on(y), .mean = on(mean), .rstd = on(rstd)});
  }
};

class VitLayerNorm : public OpTest {
 public:
  std::vector<float> forward(const Shape& s, const std::vector<float>& x) {
    Operands<float> o(*this, s, 0, x, normal(s.width, 2), normal(s.width, 3));
    GW_RUN(layer_norm, o.forward(OnDevice{}, s));
    o.y.expect_close("y", 1e-5);
    return o.y.got();
  }
  template <typename S>
  void expect_reference(const Operands<S>& o) {
    o.y.expect_rounded("y", 3e-6, 1.0, 2e-5);
    o.mean.expect_close("mean", 1e-6);
    o.rstd.expect_close("rstd", 3e-6);
  }
  template <typename S>
  void check_forward(const Shape& s, int64_t misalign) {
    Operands<S> o(*this, s, misalign);
    o.mean.device.poison(), o.rstd.device.poison();
    GW_RUN(layer_norm, o.forward(OnDevice{}, s));
    expect_reference(o);
  }
  // Adds a branch and its bias to x. Writes the sum to x, to the branch or to another array, and expects the
  // bits of an addition before the op. Elements between strided rows must be unchanged.
  enum class Out { x, branch, other };
  template <typename S>
  void check_branch(const Shape& s, int64_t misalign, Out to) {
    Operands<S> o(*this, s, misalign), alone(*this, s, misalign);
    Operand<S> branch(*this, normal(s.x_size(), 21), misalign);
    Operand<float> bias(*this, normal(s.width, 22), misalign), other(*this, normal(s.x_size(), 23), misalign);
    Operand<float>& sum = [&]() -> Operand<float>& {
      if constexpr (std::is_same_v<S, float>) {
        if (to == Out::branch) return branch;
      }
      return to == Out::x ? o.x : other;
    }();
    GW_RUN_BOTH(layer_norm, [&](auto on) {
      auto args = o.forward(on, s);
      args.branch = on(branch), args.branch_bias = on(bias), args.sum = on(sum);
      return args;
    });
    sum.expect_same_bits("sum");
    expect_reference(o);
    alone.x.device.set(sum.host);
    GW_RUN(layer_norm, alone.forward(OnDevice{}, s));
    expect_same_bits(o.y.got(), alone.y.got(), "y");
    expect_same_bits(o.mean.got(), alone.mean.got(), "mean");
    expect_same_bits(o.rstd.got(), alone.rstd.got(), "rstd");
  }
  template <typename S>
  void run_backward(Operands<S>& o, const Shape& s, bool accumulate_dx, bool accumulate) {
    Operand<float> workspace(*this, layer_norm_backward_workspace(s.rows, s.width));
    GW_RUN_BOTH(layer_norm_backward, [&](auto on) {
      auto args = s(LayerNormBackward{.x = on(o.x),
                                      .dy = on(o.dy),
                                      .gamma = on(o.gamma),
                                      .mean = on(o.mean),
                                      .rstd = on(o.rstd),
                                      .dx = on(o.dx),
                                      .d_gamma = on(o.d_gamma),
                                      .d_beta = on(o.d_beta),
                                      .dx_sum = on(o.dx_sum),
                                      .workspace = on(workspace)});
      if (!std::is_same_v<S, float>) args.dx_rounded = on(o.dx_rounded);
      args.accumulate_dx = accumulate_dx, args.accumulate = accumulate;
      return args;
    });
  }
  template <typename S>
  void check_backward(const Shape& s, int64_t misalign, bool accumulate_dx, bool accumulate) {
    Operands<S> o(*this, s, misalign);
    run_backward(o, s, accumulate_dx, accumulate);
    // The array dx includes the gaps between strided rows, which must be unchanged. A row of one element has
    // rstd 1000.
    double scale = 1.0;
    for (float r : o.rstd.host) scale = std::max<double>(scale, r);
    const double sums = std::sqrt(1.0 + static_cast<double>(s.rows));
    o.dx.expect_close("dx", 3e-6, scale);
    o.d_gamma.expect_close("d_gamma", 1e-5, sums);
    o.d_beta.expect_close("d_beta", 1e-5, sums);
    o.dx_sum.expect_close("dx_sum", 1e-5, scale * sums);
    if (!std::is_same_v<S, float> && s.stride == 0)
      expect_same_bits(o.dx_rounded.got(), widened(narrowed<S>(o.dx.got())), "dx_rounded");
  }
};

TEST_P(VitLayerNorm, ForwardMatchesTheDoubleReference) {
  for_shapes(kShapes, [&](const Shape& s, int64_t misalign) {
    check_forward<float>(s, misalign);
    check_forward<Bf16>(s, misalign);
  });
}

TEST_P(VitLayerNorm, FusedResidualAddMatchesASeparateOneBitForBit) {
  for_shapes(kShapes, [&](const Shape& s, int64_t misalign) {
    for (Out to : {Out::x, Out::branch, Out::other}) check_branch<float>(s, misalign, to);
    for (Out to : {Out::x, Out::other}) check_branch<Bf16>(s, misalign, to);
  });
}

TEST_P(VitLayerNorm, ConstantRowsGiveBetaAndOffsetsCancel) {
  std::vector<float> x(200, 3.0f);
  for (size_t c = 0; c < 100; ++c)  // the mean is far above the standard deviation of 0.5
    x[100 + c] = 4096.0f + static_cast<float>(c % 2);
  const auto got = forward({2, 100}, x), beta = normal(100, 3);
  for (size_t c = 0; c < 100; ++c) EXPECT_EQ(got[c], beta[c]);
}

TEST_P(VitLayerNorm, NanStaysInItsRow) {
  auto x = normal(3 * 65, 1);
  x[65 + 7] = std::numeric_limits<float>::quiet_NaN();
  const auto got = forward({3, 65}, x);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(std::isnan(got[i]), i / 65 == 1) << i;
}

TEST_P(VitLayerNorm, BackwardMatchesTheDoubleReferenceWithEveryAccumulateFlag) {
  for_shapes(kShapes, [&](const Shape& s, int64_t misalign) {
    for (int flags = 0; flags < 4; ++flags) {
      SCOPED_TRACE(fmt::format("flags {}", flags));
      check_backward<float>(s, misalign, (flags & 1) != 0, (flags & 2) != 0);
      check_backward<Bf16>(s, misalign, (flags & 1) != 0, (flags & 2) != 0);
    }
  });
}

TEST_P(VitLayerNorm, BackwardIsTheDerivativeOfForward) {
  const Shape s{3, 19};
  Operands<float> o(*this, s);
  run_backward(o, s, false, false);
  auto loss = [&] {
    reference::layer_norm(o.forward(OnHost{}, s));
    return dot(o.y.host, o.dy.host);
  };
  auto check = [&](std::vector<float>& values, const std::vector<float>& got) {
    for (size_t i = 0; i < values.size(); ++i)
      EXPECT_NEAR(got[i], central_difference(values, i, loss), 1e-3) << i;
  };
  check(o.x.host, o.dx.got());
  check(o.gamma.host, o.d_gamma.got());
  check(o.beta.host, o.d_beta.got());
}

TEST_P(VitLayerNorm, RepeatedRunsAndAnyNumberOfThreadsGiveTheSameBits) {
  const Shape s{1500, 72};
  expect_same_bits_with_any_threads([&] {
    Operands<float> o(*this, s);
    run_backward(o, s, false, false);
    GW_RUN(layer_norm, o.forward(OnDevice{}, s));
    return Arrays{o.dx.got(), o.d_gamma.got(), o.d_beta.got(), o.y.got()};
  });
}

GW_INSTANTIATE_BACKENDS(VitLayerNorm);

}  // namespace
}  // namespace gradwire::testing
