#include <fmt/format.h>

#include "kernels/math/exp.h"
#include "kernels/vit/softmax.h"
#include "runtime/threads/thread_pool.h"
#include "tests/kernels/backend.h"
#include "tests/kernels/compare.h"

namespace gradwire::testing {
namespace {

struct Shape {
  int64_t rows, width, ld;
  float scale = 1.0f;
  int64_t size() const { return rows * ld; }
  std::string name() const { return fmt::format("{}x{} ld {}", rows, width, ld); }
};

const std::vector<Shape> kShapes = {{0, 17, 24},     {1, 1, 1},       {5, 1, 4},           {7, 7, 8, 0.5f},
                                    {40, 17, 24},    {9, 16, 16},     {33, 31, 31},        {17, 32, 32},
                                    {6, 33, 40},     {50, 50, 56},    {20, 50, 50, 0.25f}, {3, 65, 72},
                                    {5, 127, 128},   {5, 129, 132},   {21, 197, 200},      {3, 257, 264},
                                    {2, 1024, 1024}, {2, 1025, 1028}, {3, 2050, 2056}};

std::vector<float> reference_softmax(std::vector<float> x, const Shape& s) {
  reference::softmax(
      {.x = x.data(), .y = x.data(), .rows = s.rows, .width = s.width, .ld = s.ld, .scale = s.scale});
  return x;
}

class VitSoftmax : public OpTest {
 public:
  std::vector<float> forward(const std::vector<float>& values, const Shape& s, int64_t misalign = 0) {
    auto x = array(values, misalign);
    Softmax args{
        .x = x.data(), .y = x.data(), .rows = s.rows, .width = s.width, .ld = s.ld, .scale = s.scale};
    GW_RUN(softmax, args);
    x.expect_guards_intact("x");
    return x.host();
  }
  std::vector<float> backward(const std::vector<float>& y_values, const std::vector<float>& dy_values,
                              const Shape& s, int64_t misalign = 0) {
    auto y = array(y_values, misalign), dy = array(dy_values, misalign);
    SoftmaxBackward args{
        .y = y.data(), .dy = dy.data(), .rows = s.rows, .width = s.width, .ld = s.ld, .scale = s.scale};
    GW_RUN(softmax_backward, args);
    dy.expect_guards_intact("dy");
    return dy.host();
  }
};

TEST_P(VitSoftmax, ForwardMatchesTheDoubleReferenceAndZeroesThePadding) {
  for (const Shape& shape : kShapes) {
    for (int64_t misalign : {0, 1}) {
      SCOPED_TRACE(fmt::format("{} misaligned by {}", shape.name(), misalign));
      auto x = normal(shape.size(), 3, 4.0f);
      // The padding's old contents must not affect the result.
      for (int64_t i = 0; i < shape.size(); ++i) {
        if (i % shape.ld >= shape.width) x[static_cast<size_t>(i)] = std::numeric_limits<float>::quiet_NaN();
      }
      auto got = forward(x, shape, misalign), want = reference_softmax(x, shape);
      // A sum of 2050 terms in FP32, without FMA in sanitizer builds
      expect_close(got, want, 6e-6, "y", 1e-6);
      for (int64_t i = 0; i < shape.size(); ++i) {
        if (i % shape.ld >= shape.width) {
          ASSERT_EQ(got[static_cast<size_t>(i)], 0.0f);
        }
      }
    }
  }
}

TEST_P(VitSoftmax, HugeAndEqualLogitsStayFinite) {
  Shape shape{4, 20, 24};
  std::vector<float> x(static_cast<size_t>(shape.size()), 0.0f);
  for (size_t c = 0; c < 20; ++c) {
    x[c] = 3e38f;                                                         // all equal and huge
    x[24 + c] = c == 3 ? 1e30f : -1e30f;                                  // one dominant score
    x[48 + c] = c == 5 ? 0.0f : -std::numeric_limits<float>::infinity();  // masked
    x[72 + c] = -100.0f * static_cast<float>(c);                          // underflow
  }
  auto got = forward(x, shape);
  for (size_t c = 0; c < 20; ++c) {
    EXPECT_NEAR(got[c], 0.05f, 1e-7f);
    EXPECT_EQ(got[24 + c], c == 3 ? 1.0f : 0.0f);
    EXPECT_EQ(got[48 + c], c == 5 ? 1.0f : 0.0f);
    EXPECT_EQ(got[72 + c], c == 0 ? 1.0f : 0.0f);
  }
}

TEST_P(VitSoftmax, NanStaysInItsRow) {
  Shape shape{3, 17, 24};
  auto x = normal(shape.size(), 5);
  x[24 + 2] = std::numeric_limits<float>::quiet_NaN();
  auto got = forward(x, shape);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(std::isnan(got[i]), i / 24 == 1 && i % 24 < 17) << i;
}

TEST_P(VitSoftmax, BackwardMatchesTheDoubleReferenceAndZeroesThePadding) {
  for (const Shape& shape : kShapes) {
    for (int64_t misalign : {0, 1}) {
      SCOPED_TRACE(fmt::format("{} misaligned by {}", shape.name(), misalign));
      auto y = reference_softmax(normal(shape.size(), 3, 2.0f), shape), dy = normal(shape.size(), 4);
      for (int64_t i = 0; i < shape.size(); ++i) {
        if (i % shape.ld >= shape.width) dy[static_cast<size_t>(i)] = std::numeric_limits<float>::quiet_NaN();
      }
      auto want = dy;
      reference::softmax_backward({.y = y.data(),
                                   .dy = want.data(),
                                   .rows = shape.rows,
                                   .width = shape.width,
                                   .ld = shape.ld,
                                   .scale = shape.scale});
      auto got = backward(y, dy, shape, misalign);
      expect_close(got, want, 1e-6, "dx", 0.1);
      for (int64_t i = 0; i < shape.size(); ++i) {
        if (i % shape.ld >= shape.width) {
          ASSERT_EQ(got[static_cast<size_t>(i)], 0.0f);
        }
      }
    }
  }
}

TEST_P(VitSoftmax, BackwardIsTheDerivativeOfForward) {
  Shape shape{2, 11, 12, 0.7f};
  auto x = normal(shape.size(), 6), dy = normal(shape.size(), 7);
  auto got = backward(reference_softmax(x, shape), dy, shape);
  auto masked = dy;
  for (size_t i = 0; i < masked.size(); ++i) {
    if (i % 12 >= 11) masked[i] = 0.0f;
  }
  auto loss = [&] { return dot(reference_softmax(x, shape), masked); };
  for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(got[i], central_difference(x, i, loss), 1e-4) << i;
}

TEST_P(VitSoftmax, AnyNumberOfThreadsGivesTheSameBits) {
  Shape shape{4000, 17, 24, 0.25f};
  auto x = normal(shape.size(), 8), dy = normal(shape.size(), 9);
  const int before = host_threads();
  auto y = forward(x, shape), dx = backward(y, dy, shape);
  for (int threads : thread_counts()) {
    set_host_threads(threads);
    expect_same_bits(forward(x, shape), y, "y");
    expect_same_bits(backward(y, dy, shape), dx, "dx");
  }
  set_host_threads(before);
}

GW_INSTANTIATE_BACKENDS(VitSoftmax);

TEST(ExpFloat, IsWithinTwoUnitsInTheLastPlaceOverItsWholeRange) {
  double worst = 0.0;
  for (float x = -87.3f; x < 88.0f; x += 0.000937f) {
    double want = std::exp(static_cast<double>(x));
    worst = std::max(worst, std::abs(exp_float(x) - want) / want);
  }
  EXPECT_LT(worst, 1.3e-7);
  EXPECT_EQ(exp_float(0.0f), 1.0f);
  EXPECT_EQ(exp_float(-88.0f), 0.0f);
  EXPECT_EQ(exp_float(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_TRUE(std::isnan(exp_float(std::numeric_limits<float>::quiet_NaN())));
}

}  // namespace
}  // namespace gradwire::testing
