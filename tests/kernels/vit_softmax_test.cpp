#include "kernels/math/gelu.h"
#include "kernels/vit/softmax.h"
#include "tests/kernels/operand.h"

namespace gradwire::testing {
namespace {

struct Shape {
  int64_t rows, width, ld;
  float scale = 1.0f;
  int64_t size() const { return rows * ld; }
  std::string name() const { return fmt::format("{}x{} ld {}", rows, width, ld); }

  template <typename Args>
  Args operator()(Args args) const {
    args.rows = rows, args.width = width, args.ld = ld, args.scale = scale;
    return args;
  }
  // Returns normal draws in rows of `width`, followed by `padding` in the rest of each row.
  std::vector<float> draws(uint32_t seed, float size, float padding) const {
    auto values = normal(rows * ld, seed, size);
    for (int64_t i = 0; i < std::ssize(values); ++i) {
      if (i % ld >= width) values[i] = padding;
    }
    return values;
  }
};

const std::vector<Shape> kShapes = {
    {0, 17, 24},         {1, 1, 1},       {5, 1, 4},       {7, 7, 8, 0.5f}, {40, 17, 24},
    {9, 16, 16},         {33, 31, 31},    {17, 32, 32},    {6, 33, 40},     {50, 50, 56},
    {20, 50, 50, 0.25f}, {3, 65, 72},     {5, 127, 128},   {5, 129, 132},   {21, 197, 200},
    {3, 257, 264},       {2, 1024, 1024}, {2, 1025, 1028}, {3, 2050, 2056}, {3, 517, 520, 0.5f}};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> reference_softmax(std::vector<float> x, const Shape& s) {
  reference::softmax(s(Softmax{.x = x.data(), .y = x.data()}));
  return x;
}

class VitSoftmax : public OpTest {
 public:
  std::vector<float> forward(const std::vector<float>& values, const Shape& s) {
    Operand<float> x(*this, values);
    GW_RUN_BOTH(softmax, [&](auto on) { return s(Softmax{.x = on(x), .y = on(x)}); });
    return x.got();
  }
  std::vector<float> backward(const std::vector<float>& y_values, const std::vector<float>& dy_values,
                              const Shape& s) {
    Operand<float> y(*this, y_values), dy(*this, dy_values);
    GW_RUN_BOTH(softmax_backward, [&](auto on) { return s(SoftmaxBackward{.y = on(y), .dy = on(dy)}); });
    return dy.got();
  }
  // Overwrites FP32 scores with the weights. The padding's old contents must not affect the results.
  template <typename S>
  void check(const Shape& s, int64_t misalign) {
    Operand<float> x(*this, s.draws(3, 4.0f, kNan), misalign);
    Operand<S> other(*this, s.size(), misalign), dy(*this, s.draws(4, 1.0f, kNan), misalign);
    Operand<S>& y = [&]() -> Operand<S>& {
      if constexpr (std::is_same_v<S, float>) return x;
      return other;
    }();
    GW_RUN_BOTH(softmax, [&](auto on) { return s(Softmax{.x = on(x), .y = on(y)}); });
    // The tolerance allows for a sum of 2050 FP32 terms without FMA, as in sanitizer builds.
    y.expect_rounded("y", 6e-6, 1e-6, 1e-6);
    expect_zero_padding(y, s);
    y.host = y.got();
    GW_RUN_BOTH(softmax_backward, [&](auto on) { return s(SoftmaxBackward{.y = on(y), .dy = on(dy)}); });
    // As for y: dx contains such a sum.
    dy.expect_rounded("dx", 6e-6, 0.1, 1e-6);
    expect_zero_padding(dy, s);
  }

 private:
  template <typename S>
  static void expect_zero_padding(const Operand<S>& x, const Shape& s) {
    const auto got = x.got();
    for (int64_t i = 0; i < s.size(); ++i) {
      if (i % s.ld >= s.width) {
        ASSERT_EQ(got[i], 0.0f) << i;
      }
    }
  }
};

TEST_P(VitSoftmax, MatchesTheDoubleReferenceAndZeroesThePadding) {
  for_shapes(kShapes, [&](const Shape& s, int64_t misalign) {
    check<float>(s, misalign);
    check<Bf16>(s, misalign);
  });
}

TEST_P(VitSoftmax, HugeAndEqualLogitsStayFinite) {
  Shape shape{4, 20, 24};
  std::vector<float> x(shape.size(), 0.0f);
  for (size_t c = 0; c < 20; ++c) {
    x[c] = 3e38f;                                                         // all scores are equal and huge
    x[24 + c] = c == 3 ? 1e30f : -1e30f;                                  // one score dominates
    x[48 + c] = c == 5 ? 0.0f : -std::numeric_limits<float>::infinity();  // all other scores are masked
    x[72 + c] = -100.0f * static_cast<float>(c);                          // most weights underflow
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
  x[24 + 2] = kNan;
  auto got = forward(x, shape);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(std::isnan(got[i]), i / 24 == 1 && i % 24 < 17) << i;
}

TEST_P(VitSoftmax, BackwardIsTheDerivativeOfForward) {
  const Shape shape{2, 11, 12, 0.7f};
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
  const Shape s{4000, 17, 24, 0.25f};
  expect_same_bits_with_any_threads([&] {
    const auto y = forward(normal(s.size(), 8), s);
    return Arrays{y, backward(y, normal(s.size(), 9), s)};
  });
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
