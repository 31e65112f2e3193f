// Error feedback's passes equal their formulas, which these tests state, also for non-finite values.
#include "kernels/passes/passes.h"

#include <limits>

#include "tests/kernels/backend.h"
#include "tests/kernels/compare.h"

namespace gradwire {
namespace {

using testing::Array;
using testing::expect_close;

// Arrays of one size, on the backend and, for the reference, on the host.
class Feedback : public testing::OpTest {
 protected:
  struct Operand {
    std::vector<float> values;
    Array<float> array;
  };
  Operand operand(int64_t count, uint32_t seed, int64_t misalign) {
    std::vector<float> values = normal(count, seed);
    return {values, array(values, misalign)};
  }
  // Makes some values NaN, infinite or large.
  void poison(Operand& x) {
    constexpr float kHard[] = {std::numeric_limits<float>::quiet_NaN(),
                               std::numeric_limits<float>::infinity(), 3e38f, -3e38f};
    for (size_t i = 3; i < x.values.size(); i += 11) x.values[i] = kHard[i % 4];
    x.array.set(x.values);
  }
  void ef21_step(int64_t n, bool hard, Operand& grad, Operand& residual, Operand& estimate, Operand& kept) {
    const float unit = hard ? 0.25f : 1.0f;
    for (size_t i = 0; i < grad.values.size(); ++i) {
      float &g = grad.values[i], &d = residual.values[i];
      kept.values[i] = d;
      if (std::isfinite(g)) {
        kept.values[i] = g - unit * estimate.values[i];
        g = kept.values[i] - d;
      }
      d = 0.0f;
    }
    const Ef21Difference difference{
        grad.array.data(), residual.array.data(), estimate.array.data(), kept.array.data(), unit, n};
    GW_RUN(ef21_difference, difference);
    for (const Operand* x : {&grad, &residual, &kept}) expect_equal(*x, "difference");
    residual.values = normal(n, 5, 0.1f);
    residual.array.set(residual.values);
    for (size_t i = 0; i < grad.values.size(); ++i) {
      float &mean = grad.values[i], &h = estimate.values[i];
      const float next = h + mean, deviation = kept.values[i] - residual.values[i] - unit * mean;
      residual.values[i] = std::isfinite(next) && std::isfinite(deviation) ? deviation : 0.0f;
      if (std::isfinite(next)) h = next;
      mean = next;
    }
    const Ef21Update update{
        grad.array.data(), residual.array.data(), estimate.array.data(), kept.array.data(), unit, n};
    GW_RUN(ef21_update, update);
    for (const Operand* x : {&grad, &residual, &estimate, &kept}) expect_equal(*x, "update");
  }
  static void expect_equal(const Operand& x, const char* what) {
    expect_close(x.array.host(), x.values, 0, what);
    x.array.expect_guards_intact(what);
  }
};

std::vector<int64_t> sizes() {
  auto all = testing::awkward_sizes();
  all.push_back(70001);
  return all;
}

TEST_P(Feedback, Ef21MatchesTheFormulas) {
  for (int64_t n : sizes()) {
    for (const bool hard : {false, true}) {
      const int64_t shift = n % 3;
      auto grad = operand(n, 1, shift), residual = operand(n, 2, shift), estimate = operand(n, 3, shift),
           kept = operand(n, 4, hard ? 1 : shift);
      if (hard) poison(grad);
      ef21_step(n, hard, grad, residual, estimate, kept);
    }
  }
}

TEST_P(Feedback, MomentumMatchesTheFormulas) {
  for (int64_t n : sizes()) {
    for (const bool hard : {false, true}) {
      auto grad = operand(n, 1, n % 3), momentum = operand(n, 2, hard ? 1 : n % 3);
      if (hard) poison(grad);
      const MomentumAdd add{
          .grad = grad.array.data(), .momentum = momentum.array.data(), .factor = 0.9f, .count = n};
      for (size_t i = 0; i < grad.values.size(); ++i) {
        if (!std::isfinite(grad.values[i])) continue;
        grad.values[i] += 0.9f * momentum.values[i];
        momentum.values[i] = std::isfinite(grad.values[i]) ? grad.values[i] : 0.0f;
      }
      GW_RUN(momentum_add, add);
      expect_equal(grad, "grad");
      expect_equal(momentum, "momentum");
      for (size_t i = 0; i < grad.values.size(); i += 2) grad.values[i] = i % 4 == 0 ? 0.0f : -0.0f;
      for (size_t i = 0; i < grad.values.size(); ++i) {
        if (grad.values[i] != 0.0f) momentum.values[i] = 0.0f;
      }
      grad.array.set(grad.values);
      const MomentumMask mask{grad.array.data(), momentum.array.data(), n};
      GW_RUN(momentum_mask, mask);
      expect_equal(grad, "grad");
      expect_equal(momentum, "masked momentum");
    }
  }
}

// The norm has the same bits on every backend, whatever the alignment; elements that are not finite do not
// count.
TEST_P(Feedback, ClippingIsTheReference) {
  auto all = sizes();
  all.push_back(kClipChunk * kClipFold + 5);  // more chunks than lanes that add them
  for (int64_t n : all) {
    for (const bool hard : {false, true}) {
      auto grad = operand(n, 1, n % 5);
      if (hard) poison(grad);
      auto chunks = array<double>(clip_chunks(n));
      for (const float share : {2.0f, 0.5f}) {
        const float norm = std::sqrt(static_cast<float>(n));
        const auto before = grad.values;
        reference::clip_norm({.grad = grad.values.data(), .max_norm = share * norm, .count = n});
        if (n > 1000 && !hard) {
          EXPECT_EQ(before == grad.values, share > 1) << n;
        }
        GW_RUN(clip_norm, (ClipNorm{grad.array.data(), chunks.data(), share * norm, n}));
        expect_equal(grad, "clipped");
      }
    }
  }
}

TEST_P(Feedback, AClippedArrayHasTheNorm) {
  auto grad = array<float>({3.0f, -4.0f, std::numeric_limits<float>::infinity(), 0.0f});
  auto chunks = array<double>(1);
  GW_RUN(clip_norm, (ClipNorm{grad.data(), chunks.data(), 1.0f, 4}));
  EXPECT_EQ(grad.host(), (std::vector<float>{0.6f, -0.8f, std::numeric_limits<float>::infinity(), 0.0f}));
}

// An estimate equals the gradient once nothing is lost, and a non-finite gradient leaves the estimates.
TEST_P(Feedback, Ef21TakesTheGradientWhereNothingIsLost) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  auto grad = array<float>({1.0f, nan, 4.0f}), residual = array<float>({0.5f, 0.5f, 0.0f}),
       estimate = array<float>({0.25f, 0.25f, 0.0f}), kept = array<float>(3);
  GW_RUN(ef21_difference,
         (Ef21Difference{grad.data(), residual.data(), estimate.data(), kept.data(), 1.0f, 3}));
  EXPECT_EQ(grad.host()[0], 0.25f);
  EXPECT_EQ(grad.host()[2], 4.0f);
  GW_RUN(ef21_update, (Ef21Update{grad.data(), residual.data(), estimate.data(), kept.data(), 1.0f, 3}));
  EXPECT_EQ(residual.host(), (std::vector<float>{0.5f, 0.0f, 0.0f}));
  EXPECT_EQ(estimate.host(), (std::vector<float>{0.5f, 0.25f, 4.0f}));
  EXPECT_EQ(grad.host()[2], 4.0f);
  EXPECT_TRUE(std::isnan(grad.host()[1]));
}

GW_INSTANTIATE_BACKENDS(Feedback);

}  // namespace
}  // namespace gradwire
