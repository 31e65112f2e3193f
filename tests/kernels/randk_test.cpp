// Random-k: the chosen coordinates, and passes that match the reference bit for bit.
#include "kernels/randk/randk.h"

#include <fmt/format.h>

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "runtime/threads/thread_pool.h"
#include "tests/kernels/backend.h"
#include "tests/kernels/compare.h"

namespace gradwire {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kRatios[] = {1e-6, 0.01, 0.3, 0.7, 1.0};

std::vector<int64_t> all_chosen(const Strata& strata, const RandKDraw& draw) {
  std::vector<int64_t> all;
  const int64_t rotation = draw.rotation(strata.count);
  for (int64_t j = 0; j < strata.k; ++j) all.push_back(draw.chosen(strata, j, rotation));
  return all;
}

TEST(RandKStrata, ChooseKDistinctElements) {
  for (int64_t count : {1, 2, 7, 100, 1023, 4099}) {
    for (double ratio : kRatios) {
      const Strata strata{count, randk_count(count, ratio)};
      for (uint64_t step : {0, 1, 2}) {
        const RandKDraw draw{3, step, 5};
        auto chosen = all_chosen(strata, draw);
        for (int64_t j = 0; j < strata.k; ++j) {
          ASSERT_EQ(draw.stratum_of(strata, chosen[j], draw.rotation(count)), j)
              << count << " elements, ratio " << ratio;
        }
        std::sort(chosen.begin(), chosen.end());
        ASSERT_TRUE(std::adjacent_find(chosen.begin(), chosen.end()) == chosen.end());
        ASSERT_GE(chosen.front(), 0);
        ASSERT_LT(chosen.back(), count);
      }
    }
  }
}

TEST(RandKStrata, CoverTheTensorOnceInOrder) {
  for (int64_t count : {1, 7, 1000, 1023}) {
    for (int64_t k : {int64_t{1}, count / 3 + 1, count - count / 4, count}) {
      const Strata strata{count, k};
      int64_t position = 0;
      for (int64_t j = 0; j < k; ++j) {
        ASSERT_EQ(strata.begin(j), position);
        ASSERT_GE(strata.size(j), 1);
        for (int64_t i = 0; i < strata.size(j); ++i) ASSERT_EQ(strata.of(position++), j);
      }
      ASSERT_EQ(position, count);
    }
  }
  // With these sizes, the product of size and k exceeds 64 bits.
  const Strata huge{(int64_t{1} << 40) + 12345, (int64_t{1} << 39) + 7};
  for (int64_t j : {int64_t{0}, huge.k / 2, huge.k - 1}) EXPECT_EQ(huge.of(huge.begin(j)), j);
  EXPECT_EQ(huge.begin(huge.k - 1) + huge.size(huge.k - 1), huge.count);
}

// Counts how often each element is chosen. With unequal probabilities, error feedback would starve some
// elements, and the closed form of the error would not hold.
TEST(RandKStrata, EveryElementIsChosenWithTheSameProbability) {
  constexpr int kSteps = 20000;
  for (int64_t count : {10, 57, 130}) {
    for (double ratio : {0.05, 0.3, 0.7}) {
      const Strata strata{count, randk_count(count, ratio)};
      std::vector<int> times(count);
      for (uint64_t step = 0; step < kSteps; ++step) {
        for (int64_t at : all_chosen(strata, {1, step, 2})) ++times[at];
      }
      const double p = static_cast<double>(strata.k) / static_cast<double>(count);
      const double deviation = std::sqrt(kSteps * p * (1 - p));
      for (int64_t i = 0; i < count; ++i) {
        EXPECT_NEAR(times[i], kSteps * p, 5 * deviation)
            << "element " << i << " of " << count << ", ratio " << ratio;
      }
    }
  }
}

TEST(RandKStrata, StepsTensorsAndSeedsChooseDifferently) {
  const Strata strata{1000, 100};
  const auto base = all_chosen(strata, {1, 1, 1});
  EXPECT_EQ(base, all_chosen(strata, {1, 1, 1}));
  EXPECT_NE(base, all_chosen(strata, {1, 2, 1}));
  EXPECT_NE(base, all_chosen(strata, {1, 1, 2}));
  EXPECT_NE(base, all_chosen(strata, {2, 1, 1}));
}

// Compares the error with the closed form: the expected dropped share of the squared norm is 1 - k/n, for
// arbitrary values.
TEST(RandKStrata, TheExpectedSquaredErrorIsOneMinusTheRatio) {
  const int64_t count = 40000;
  const auto gaussian = testing::normal(count, 1);
  std::vector<float> ramp, comb(static_cast<size_t>(count), 0.0f);
  for (int64_t i = 0; i < count; ++i) ramp.push_back(static_cast<float>(i));
  for (int64_t i = 0; i < count; i += 100) comb[i] = 1.0f;  // a distance of 100, the period of the strata
  for (const auto& values : {gaussian, ramp, comb}) {
    const double norm2 = testing::dot(values, values);
    for (double ratio : {0.01, 0.1, 0.7}) {
      const Strata strata{count, randk_count(count, ratio)};
      const uint64_t steps = ratio < 0.05 ? 400 : 40;
      double kept = 0;
      for (uint64_t step = 0; step < steps; ++step) {
        for (int64_t at : all_chosen(strata, {9, step, 0})) {
          const double x = values[at];
          kept += x * x / norm2;
        }
      }
      // The check compares the kept share, because 2 % of the dropped share would be a weak test.
      EXPECT_NEAR(kept / static_cast<double>(steps) / ratio, 1.0, 0.02 + (values == comb ? 0.1 : 0.0))
          << "ratio " << ratio;
    }
  }
}

class RandK : public testing::OpTest {
 public:
  struct State {
    std::vector<float> grad, residual, values;
    std::vector<int64_t> chosen;
  };

  // Returns tensors of the given sizes with gaps of zeros in between. Sets `count` to the total number of
  // elements.
  static std::vector<RandKTensor> tensors_of(const std::vector<int64_t>& sizes, int64_t* count) {
    std::vector<RandKTensor> tensors;
    *count = 0;
    for (int64_t size : sizes) {
      tensors.push_back({.offset = *count, .count = size, .index = static_cast<int32_t>(tensors.size() + 3)});
      *count += size + 3;
    }
    return tensors;
  }

  State start(const std::vector<RandKTensor>& tensors, int64_t count, uint32_t seed) {
    State s;
    s.grad.assign(static_cast<size_t>(count), 0.0f);
    s.residual = s.grad;
    const auto g = normal(count, seed), e = normal(count, seed + 1);
    for (const RandKTensor& t : tensors) {
      std::copy_n(g.begin() + t.offset, t.count, s.grad.begin() + t.offset);
      std::copy_n(e.begin() + t.offset, t.count, s.residual.begin() + t.offset);
    }
    return s;
  }

  // Runs one gather on the backend and one by the reference from the same state, and expects the same bits.
  // Returns the backend's state.
  State gather(const RandKTable& table, const State& before, bool with_residual, int64_t misalign,
               uint64_t step) {
    const int64_t count = static_cast<int64_t>(before.grad.size());
    auto grad = array(before.grad, misalign), residual = array(before.residual, misalign),
         values = array<float>(table.values(), misalign);
    auto chosen = array<int64_t>(table.values());
    auto steps = array(std::vector<uint64_t>{step});
    RandKGather args{.table = &table,
                     .grad = grad.data(),
                     .residual = with_residual ? residual.data() : nullptr,
                     .count = count,
                     .values = values.data(),
                     .chosen = chosen.data(),
                     .seed = 11,
                     .step = steps.data()};
    GW_RUN(randk_gather, args);
    grad.expect_guards_intact("grad");
    residual.expect_guards_intact("residual");
    values.expect_guards_intact("values");
    chosen.expect_guards_intact("chosen");
    State got{grad.host(), residual.host(), values.host(), chosen.host()}, want = before;
    want.values.resize(static_cast<size_t>(table.values()));
    want.chosen.resize(want.values.size());
    args.grad = want.grad.data();
    args.residual = with_residual ? want.residual.data() : nullptr;
    args.values = want.values.data();
    args.chosen = want.chosen.data();
    args.step = &step;
    reference::randk_gather(args);
    EXPECT_EQ(got.chosen, want.chosen);
    testing::expect_same_bits(got.grad, want.grad, "grad");
    testing::expect_same_bits(got.residual, want.residual, "residual");
    for (size_t j = 0; j < want.values.size(); ++j) {
      if (!std::isnan(want.values[j])) {
        EXPECT_EQ(got.values[j], want.values[j]) << "value " << j;
      } else {
        EXPECT_TRUE(std::isnan(got.values[j])) << "value " << j;
      }
    }
    return got;
  }
};

TEST_P(RandK, GatherHasTheReferencesBits) {
  uint32_t seed = 0;
  for (const auto& sizes : {testing::awkward_sizes(), std::vector<int64_t>{9001}, std::vector<int64_t>{1},
                            std::vector<int64_t>{}, std::vector<int64_t>{0, 0}}) {
    for (double ratio : kRatios) {
      for (int64_t misalign : {0, 1}) {
        for (bool with_residual : {true, false}) {
          int64_t count = 0;
          const auto tensors = tensors_of(sizes, &count);
          RandKTable table(stream, tensors, ratio);
          seed += 2;
          gather(table, start(tensors, count, seed), with_residual, misalign, seed);
          if (HasFailure()) FAIL() << "ratio " << ratio << ", residual " << with_residual;
        }
      }
    }
  }
}

TEST_P(RandK, ValuesPlusResidualAreTheInput) {
  int64_t count = 0;
  const auto tensors = tensors_of({1025, 1, 130, 4099}, &count);
  RandKTable table(stream, tensors, 0.1);
  const State before = start(tensors, count, 1);
  State s = gather(table, before, true, 0, 7);
  auto grad = array(s.grad), residual = array(s.residual), values = array(s.values);
  auto chosen = array(s.chosen);
  GW_RUN(
      randk_scatter,
      (RandKScatter{
          .chosen = chosen.data(), .values = values.data(), .grad = grad.data(), .count = table.values()}));
  grad.expect_guards_intact("grad");
  const auto applied = grad.host();
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i);
    ASSERT_EQ(applied[at] + s.residual[at], before.grad[at] + before.residual[at]) << i;
  }
}

TEST_P(RandK, ResidualKeepsTheRoundingErrorsOfSentValues) {
  int64_t count = 0;
  const auto tensors = tensors_of({777, 64}, &count);
  RandKTable table(stream, tensors, 0.2);
  const State s = gather(table, start(tensors, count, 3), true, 0, 1);
  const auto lost = normal(table.values(), 5);
  auto grad = array(s.grad), residual = array(s.residual), values = array(s.values), lost_array = array(lost);
  auto chosen = array(s.chosen);
  GW_RUN(randk_scatter, (RandKScatter{.chosen = chosen.data(),
                                      .values = values.data(),
                                      .lost = lost_array.data(),
                                      .grad = grad.data(),
                                      .residual = residual.data(),
                                      .count = table.values()}));
  auto want_grad = s.grad, want_residual = s.residual;
  reference::randk_scatter({.chosen = s.chosen.data(),
                            .values = s.values.data(),
                            .lost = lost.data(),
                            .grad = want_grad.data(),
                            .residual = want_residual.data(),
                            .count = table.values()});
  testing::expect_same_bits(grad.host(), want_grad, "grad");
  testing::expect_same_bits(residual.host(), want_residual, "residual");
  EXPECT_NE(want_residual, s.residual);
}

// Expects a non-finite element, chosen or not, to reach its tensor's values, but not the values of other
// tensors or a residual.
TEST_P(RandK, NonFiniteElementsStayInTheirTensor) {
  int64_t count = 0;
  const auto tensors = tensors_of({300, 257, 40}, &count);
  RandKTable table(stream, tensors, 0.02);
  const RandKTensor& hit = table.host()[1];
  for (float bad : {kNan, kInf, -kInf}) {
    for (int64_t element : {0, 1, 100, 255, 256}) {
      State before = start(tensors, count, 5);
      before.grad[hit.offset + element] = bad;
      const State after = gather(table, before, true, element % 2, 3);
      for (const RandKTensor& t : table.host()) {
        int64_t finite = 0;
        for (int64_t j = t.packed; j < t.packed + t.k; ++j) finite += std::isfinite(after.values[j]) ? 1 : 0;
        EXPECT_EQ(finite, t.index == hit.index ? t.k - 1 : t.k) << "tensor " << t.index;
      }
      for (float e : after.residual) ASSERT_TRUE(std::isfinite(e));
    }
  }
}

TEST_P(RandK, ClampsResidualsThatWouldOverflow) {
  RandKTable table(stream, {{.count = 64}}, 0.01);
  State before;
  before.grad.assign(64, 3e38f);
  before.residual.assign(64, 3e38f);
  before.grad[5] = before.residual[5] = -3e38f;
  const State after = gather(table, before, true, 0, 0);
  int64_t clamped = 0;
  for (float e : after.residual) clamped += std::abs(e) == FLT_MAX ? 1 : 0;
  EXPECT_EQ(clamped, 63);
}

TEST_P(RandK, RunsGiveTheSameBitsForAnyNumberOfThreads) {
  int64_t count = 0;
  const auto tensors = tensors_of({GetParam().simt ? 3000 : 200000, 5000, 77}, &count);
  RandKTable table(stream, tensors, 0.3);
  State before = start(tensors, count, 5);
  for (int64_t i : {3, 4, 5, 2900}) before.grad[i] = kNan;
  const int threads = host_threads();
  for (int n : testing::thread_counts()) {
    set_host_threads(n);
    gather(table, before, true, 0, 1);
  }
  set_host_threads(threads);
}

GW_INSTANTIATE_BACKENDS(RandK);

}  // namespace
}  // namespace gradwire
