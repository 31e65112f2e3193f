#include <fmt/format.h>

#include "kernels/vit/layer_norm.h"
#include "runtime/threads/thread_pool.h"
#include "tests/kernels/backend.h"
#include "tests/kernels/compare.h"

namespace gradwire::testing {
namespace {

struct Shape {
  int64_t rows, width, stride = 0;
  size_t x_size() const {
    return rows == 0 ? 0 : static_cast<size_t>((rows - 1) * (stride != 0 ? stride : width) + width);
  }
  size_t y_size() const { return static_cast<size_t>(rows * width); }
  std::string name() const { return fmt::format("{}x{} stride {}", rows, width, stride); }
};

const std::vector<Shape> kShapes = {{0, 64},
                                    {1, 1},
                                    {3, 7},
                                    {5, 31},
                                    {17, 32},
                                    {16, 33},
                                    {64, 64},
                                    {270, 64},
                                    {33, 127},
                                    {9, 128},
                                    {7, 129},
                                    {5, 256},
                                    {3, 384},
                                    {2, 1023},
                                    {3, 1024},
                                    {2, 1025},
                                    {4, 3072},
                                    {5, 64, 5 * 64},
                                    {6, 33, 2 * 33 + 1},
                                    {3, 5000}};

struct Inputs {
  Shape shape;
  std::vector<float> x, gamma, beta, dy, mean, rstd, dx, d_gamma, d_beta;

  explicit Inputs(Shape s, uint32_t seed = 1) : shape(s) {
    auto width = s.width;
    x = OpTest::normal(static_cast<int64_t>(s.x_size()), seed, 2.0f);
    for (float& v : x) v += 0.5f;
    gamma = OpTest::normal(width, seed + 1);
    beta = OpTest::normal(width, seed + 2);
    dy = OpTest::normal(static_cast<int64_t>(s.y_size()), seed + 3);
    dx = OpTest::normal(static_cast<int64_t>(s.x_size()), seed + 4);
    d_gamma = OpTest::normal(width, seed + 5);
    d_beta = OpTest::normal(width, seed + 6);
    mean.resize(static_cast<size_t>(s.rows));
    rstd.resize(static_cast<size_t>(s.rows));
    forward();
  }
  std::vector<float> forward() {
    std::vector<float> y(shape.y_size());
    reference::layer_norm({.x = x.data(),
                           .gamma = gamma.data(),
                           .beta = beta.data(),
                           .y = y.data(),
                           .mean = mean.data(),
                           .rstd = rstd.data(),
                           .rows = shape.rows,
                           .width = shape.width,
                           .x_stride = shape.stride});
    return y;
  }
};

struct Gradients {
  std::vector<float> dx, d_gamma, d_beta, dx_sum;
};

Gradients reference_backward(const Inputs& in, bool accumulate_dx, bool accumulate) {
  Gradients g{in.dx, in.d_gamma, in.d_beta, in.d_beta};
  reference::layer_norm_backward({.x = in.x.data(),
                                  .dy = in.dy.data(),
                                  .gamma = in.gamma.data(),
                                  .mean = in.mean.data(),
                                  .rstd = in.rstd.data(),
                                  .dx = g.dx.data(),
                                  .d_gamma = g.d_gamma.data(),
                                  .d_beta = g.d_beta.data(),
                                  .dx_sum = g.dx_sum.data(),
                                  .rows = in.shape.rows,
                                  .width = in.shape.width,
                                  .x_stride = in.shape.stride,
                                  .accumulate_dx = accumulate_dx,
                                  .accumulate = accumulate});
  return g;
}

class VitLayerNorm : public OpTest {
 public:
  // {y, mean, rstd}
  std::vector<std::vector<float>> forward(const Inputs& in, int64_t misalign) {
    auto x = array(in.x, misalign), gamma = array(in.gamma, misalign), beta = array(in.beta, misalign);
    auto y = array<float>(static_cast<int64_t>(in.shape.y_size()), misalign);
    auto mean = array<float>(in.shape.rows), rstd = array<float>(in.shape.rows);
    LayerNorm args{.x = x.data(),
                   .gamma = gamma.data(),
                   .beta = beta.data(),
                   .y = y.data(),
                   .mean = mean.data(),
                   .rstd = rstd.data(),
                   .rows = in.shape.rows,
                   .width = in.shape.width,
                   .x_stride = in.shape.stride};
    GW_RUN(layer_norm, args);
    y.expect_guards_intact("y");
    mean.expect_guards_intact("mean");
    rstd.expect_guards_intact("rstd");
    return {y.host(), mean.host(), rstd.host()};
  }

  Gradients backward(const Inputs& in, bool accumulate_dx, bool accumulate, int64_t misalign) {
    auto x = array(in.x, misalign), dy = array(in.dy, misalign), gamma = array(in.gamma, misalign);
    auto mean = array(in.mean), rstd = array(in.rstd);
    auto dx = array(in.dx, misalign), d_gamma = array(in.d_gamma), d_beta = array(in.d_beta),
         dx_sum = array(in.d_beta);
    auto workspace = array<float>(layer_norm_backward_workspace(in.shape.rows, in.shape.width));
    LayerNormBackward args{.x = x.data(),
                           .dy = dy.data(),
                           .gamma = gamma.data(),
                           .mean = mean.data(),
                           .rstd = rstd.data(),
                           .dx = dx.data(),
                           .d_gamma = d_gamma.data(),
                           .d_beta = d_beta.data(),
                           .dx_sum = dx_sum.data(),
                           .workspace = workspace.data(),
                           .rows = in.shape.rows,
                           .width = in.shape.width,
                           .x_stride = in.shape.stride,
                           .accumulate_dx = accumulate_dx,
                           .accumulate = accumulate};
    GW_RUN(layer_norm_backward, args);
    dx.expect_guards_intact("dx");
    d_gamma.expect_guards_intact("d_gamma");
    d_beta.expect_guards_intact("d_beta");
    dx_sum.expect_guards_intact("dx_sum");
    workspace.expect_guards_intact("workspace");
    return {dx.host(), d_gamma.host(), d_beta.host(), dx_sum.host()};
  }
};

TEST_P(VitLayerNorm, ForwardMatchesTheDoubleReference) {
  for (const Shape& shape : kShapes) {
    Inputs in(shape);
    auto want = in.forward();
    for (int64_t misalign : {0, 1}) {
      SCOPED_TRACE(fmt::format("{} misaligned by {}", shape.name(), misalign));
      auto got = forward(in, misalign);
      expect_close(got[0], want, 3e-6, "y");
      expect_close(got[1], in.mean, 1e-6, "mean");
      expect_close(got[2], in.rstd, 3e-6, "rstd");
    }
  }
}

TEST_P(VitLayerNorm, FusedResidualAddMatchesASeparateOneBitForBit) {
  for (const Shape& shape : kShapes) {
    Inputs in(shape);
    const auto count = static_cast<int64_t>(shape.x_size()), size = static_cast<int64_t>(shape.y_size());
    const int64_t stride = shape.stride != 0 ? shape.stride : shape.width;
    auto branch = normal(count, 21), bias = normal(shape.width, 22), gaps = normal(count, 23);
    // Elements between strided rows are not written.
    auto with_sums = [&](std::vector<float> into) {
      for (int64_t row = 0; row < shape.rows; ++row) {
        for (int64_t c = 0; c < shape.width; ++c) {
          const auto i = static_cast<size_t>(row * stride + c);
          into[i] = in.x[i] + (branch[i] + bias[static_cast<size_t>(c)]);
        }
      }
      return into;
    };
    Inputs joined = in;
    joined.x = with_sums(in.x);
    for (int64_t misalign : {0, 1}) {
      auto want = forward(joined, misalign);
      for (bool in_place : {false, true}) {
        SCOPED_TRACE(
            fmt::format("{} misaligned by {}{}", shape.name(), misalign, in_place ? ", in place" : ""));
        auto x = array(in.x, misalign), gamma = array(in.gamma, misalign), beta = array(in.beta, misalign);
        auto y = array<float>(size, misalign), other = array(gaps, misalign);
        auto mean = array<float>(shape.rows), rstd = array<float>(shape.rows);
        auto product = array(branch, misalign), product_bias = array(bias, misalign);
        auto& out = in_place ? product : other;
        LayerNorm args{.x = x.data(),
                       .gamma = gamma.data(),
                       .beta = beta.data(),
                       .y = y.data(),
                       .mean = mean.data(),
                       .rstd = rstd.data(),
                       .rows = shape.rows,
                       .width = shape.width,
                       .x_stride = shape.stride,
                       .branch = product.data(),
                       .branch_bias = product_bias.data(),
                       .sum = out.data()};
        GW_RUN(layer_norm, args);
        out.expect_guards_intact("sum");
        y.expect_guards_intact("y");
        expect_same_bits(out.host(), with_sums(in_place ? branch : gaps), "sum");
        expect_same_bits(y.host(), want[0], "y");
        expect_same_bits(mean.host(), want[1], "mean");
        expect_same_bits(rstd.host(), want[2], "rstd");
      }
    }
  }
}

TEST_P(VitLayerNorm, ConstantRowsGiveBetaAndOffsetsCancel) {
  Inputs in({2, 100});
  for (size_t c = 0; c < 100; ++c) {
    in.x[c] = 3.0f;
    in.x[100 + c] = 4096.0f + static_cast<float>(c % 2);  // mean far above the deviation of 0.5
  }
  auto want = in.forward();
  auto got = forward(in, 0);
  expect_close(got[0], want, 1e-5, "y");
  for (size_t c = 0; c < 100; ++c) EXPECT_EQ(got[0][c], in.beta[c]);
}

TEST_P(VitLayerNorm, NanStaysInItsRow) {
  Inputs in({3, 65});
  in.x[65 + 7] = std::numeric_limits<float>::quiet_NaN();
  auto got = forward(in, 0)[0];
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(std::isnan(got[i]), i / 65 == 1) << i;
}

TEST_P(VitLayerNorm, BackwardMatchesTheDoubleReferenceWithEveryAccumulateFlag) {
  for (const Shape& shape : kShapes) {
    Inputs in(shape);
    for (int flags = 0; flags < 4; ++flags) {
      SCOPED_TRACE(fmt::format("{} flags {}", shape.name(), flags));
      bool accumulate_dx = (flags & 1) != 0, accumulate = (flags & 2) != 0;
      auto want = reference_backward(in, accumulate_dx, accumulate);
      auto got = backward(in, accumulate_dx, accumulate, flags % 2);
      // dx includes the gaps between strided rows, which must be unchanged. A row of one element has rstd
      // 1000.
      double scale = 1.0;
      for (float r : in.rstd) scale = std::max<double>(scale, r);
      expect_close(got.dx, want.dx, 3e-6, "dx", scale);
      expect_close(got.d_gamma, want.d_gamma, 1e-5, "d_gamma",
                   std::sqrt(1.0 + static_cast<double>(shape.rows)));
      expect_close(got.d_beta, want.d_beta, 1e-5, "d_beta", std::sqrt(1.0 + static_cast<double>(shape.rows)));
      expect_close(got.dx_sum, want.dx_sum, 1e-5, "dx_sum",
                   scale * std::sqrt(1.0 + static_cast<double>(shape.rows)));
    }
  }
}

TEST_P(VitLayerNorm, BackwardIsTheDerivativeOfForward) {
  Inputs in({3, 19});
  auto got = backward(in, false, false, 0);
  auto loss = [&] { return dot(in.forward(), in.dy); };
  for (size_t i = 0; i < in.x.size(); ++i)
    EXPECT_NEAR(got.dx[i], central_difference(in.x, i, loss), 1e-3) << i;
  for (size_t i = 0; i < in.gamma.size(); ++i) {
    EXPECT_NEAR(got.d_gamma[i], central_difference(in.gamma, i, loss), 1e-3) << i;
    EXPECT_NEAR(got.d_beta[i], central_difference(in.beta, i, loss), 1e-3) << i;
  }
}

TEST_P(VitLayerNorm, RepeatedRunsAndAnyNumberOfThreadsGiveTheSameBits) {
  Inputs in({1500, 72});
  const int before = host_threads();
  auto first = backward(in, false, false, 0);
  auto first_y = forward(in, 0)[0];
  for (int threads : thread_counts()) {
    set_host_threads(threads);
    auto again = backward(in, false, false, 0);
    expect_same_bits(again.dx, first.dx, "dx");
    expect_same_bits(again.d_gamma, first.d_gamma, "d_gamma");
    expect_same_bits(again.d_beta, first.d_beta, "d_beta");
    expect_same_bits(forward(in, 0)[0], first_y, "y");
  }
  set_host_threads(before);
}

GW_INSTANTIATE_BACKENDS(VitLayerNorm);

}  // namespace
}  // namespace gradwire::testing
