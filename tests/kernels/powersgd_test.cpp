// PowerSGD's passes. Products match the double reference for any shape and rank, residuals store the error,
// and non-finite values reach the result but do not reach the state.
#include <fmt/format.h>

#include <cfloat>
#include <cstring>
#include <limits>

#include "runtime/util/error.h"
#include "tests/kernels/powersgd_fixture.h"
#include "tests/support/thinned.h"

namespace gradwire {
namespace {

using testing::all_powersgd_cases;
using testing::gather;
using testing::loss_of;
using testing::MatrixBucket;
using testing::MatrixShape;
using testing::negated;
using testing::Pending;
using testing::powersgd_cases;
using testing::thinned;
using testing::worst;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class PowerSgd : public testing::PowerSgdFixture {};

// Tests random gradients, residuals and factors. The gaps contain poison.
TEST_P(PowerSgd, ProjectionsAgreeWithTheDoubleReference) {
  uint32_t seed = 0;
  for (const auto& c : all_powersgd_cases(GetParam())) {
    for (int which = 0; which < 4; ++which) {
      const bool with_residual = which % 2 == 0, onto = which >= 2;
      SCOPED_TRACE(fmt::format("{}, {}{}", c.name, onto ? "onto P" : "of Q", with_residual ? ", ef" : ""));
      MatrixBucket b = bucket(c.shapes, c.gap);
      auto grad = normal(b.elements, ++seed), residual = normal(b.elements, ++seed), want_residual = residual;
      const auto factor = normal(onto ? b.p_elements : b.q_elements, ++seed);
      auto want = normal(onto ? b.q_elements : b.p_elements, 1), got = want;
      std::vector<float>* const kept = with_residual ? &residual : nullptr;
      float* const want_kept = with_residual ? want_residual.data() : nullptr;
      if (onto) {
        got = project_onto(b, grad, kept, factor);
        PowerSgdProjectOnto args{
            .table = &b.table, .grad = grad.data(), .p = factor.data(), .q = want.data()};
        args.residual = want_kept;
        reference::powersgd_project_onto(args);
      } else {
        got = project(b, grad, kept, factor);
        PowerSgdProject args{.table = &b.table, .grad = grad.data(), .q = factor.data(), .p = want.data()};
        args.residual = want_kept;
        reference::powersgd_project(args);
      }
      ASSERT_EQ(residual, want_residual) << "M = grad + residual is one FP32 addition";
      for (const auto& d : b.table.host()) {
        // In FP32 sums of n random terms, both the rounding error and the result grow like sqrt(n).
        const int64_t at = onto ? d.q_offset : d.p_offset, size = int64_t{onto ? d.cols : d.rows} * d.rank;
        ASSERT_LT(
            worst(gather(got, at, size), gather(want, at, size), std::sqrt(2.0 * (onto ? d.rows : d.cols))),
            1e-5)
            << d.rows << " x " << d.cols;
      }
    }
  }
}

TEST_P(PowerSgd, OtherPassesAgreeWithTheDoubleReference) {
  uint32_t seed = 500;
  for (const auto& c : all_powersgd_cases(GetParam())) {
    SCOPED_TRACE(c.name);
    MatrixBucket b = bucket(c.shapes, c.gap);
    const auto m = normal(b.elements, ++seed);
    // The columns of P have a norm of about 1, as after orthonormalize().
    auto basis = normal(b.p_elements, ++seed);
    for (const auto& d : b.table.host()) {
      for (int64_t i = 0; i < int64_t{d.rows} * d.rank; ++i)
        basis[d.p_offset + i] /= std::sqrt(float(d.rows));
    }
    auto got_q = back_project(b, m, basis, {});
    auto want_q = normal(b.q_elements, 1);
    reference::powersgd_back_project(
        {.table = &b.table, .m = m.data(), .p = basis.data(), .q = want_q.data()});

    auto got_grad = reconstruct(b, basis, want_q, 0.5f, {});
    auto want_grad = normal(b.elements, 1);
    reference::powersgd_reconstruct(
        {.table = &b.table, .p = basis.data(), .q = want_q.data(), .grad = want_grad.data(), .scale = 0.5f});

    auto residual = m, want_residual = m;
    const Pending pending{basis, want_q, {}};
    settle(b, residual, pending);
    reference::powersgd_settle(
        {.table = &b.table, .residual = want_residual.data(), .pending = pending.args()});
    for (const auto& d : b.table.host()) {
      SCOPED_TRACE(fmt::format("matrix of {} x {}", d.rows, d.cols));
      int64_t size = int64_t{d.rows} * d.cols, q_size = int64_t{d.cols} * d.rank;
      EXPECT_LT(worst(gather(got_q, d.q_offset, q_size), gather(want_q, d.q_offset, q_size), 1.0), 2e-5);
      EXPECT_LT(worst(gather(got_grad, d.offset, size), gather(want_grad, d.offset, size), 1.0), 1e-5);
      EXPECT_LT(worst(gather(residual, d.offset, size), gather(want_residual, d.offset, size), 1.0), 1e-5);
    }
    if (HasFailure()) return;
  }
}

// Adds the pending part of the residual early. The addition can happen at any time before the next step
// without changing that step.
TEST_P(PowerSgd, SettlingBeforeAProjectionChangesNoBit) {
  uint32_t seed = 300;
  for (const auto& c : all_powersgd_cases(GetParam())) {
    MatrixBucket b = bucket(c.shapes, c.gap);
    const auto grad = normal(b.elements, ++seed), held = normal(b.elements, ++seed);
    Pending pending{normal(b.p_elements, ++seed, 0.1f), normal(b.q_elements, ++seed), {}};
    if (c.shapes.size() > 1) {  // a flagged matrix ignores its pending factors
      pending.flags.assign(c.shapes.size(), 0);
      pending.flags[1] = 1;
      const auto& d = b.table.host()[1];
      std::fill_n(pending.q.begin() + d.q_offset, d.cols * d.rank, kNan);
    }
    const auto& last = b.table.host().back();
    if (last.rows > 1) pending.q[last.q_offset] = 3e38f;  // the product overflows, so the residual becomes 0
    auto settled = held, one_by_one = held;
    settle(b, settled, pending);
    for (int matrix = b.table.count() - 1; matrix >= 0; --matrix) settle(b, one_by_one, pending, matrix);
    ASSERT_EQ(one_by_one, settled) << c.name;
    for (float e : settled) ASSERT_TRUE(is_finite(e)) << c.name;
    ASSERT_NE(settled, held) << c.name;
    for (bool onto : {false, true}) {
      SCOPED_TRACE(std::string(c.name) + (onto ? ", onto P" : ""));
      const auto basis = normal(onto ? b.p_elements : b.q_elements, ++seed);
      auto lazy = held, eager = settled;
      const auto lazy_factor = project(onto, b, grad, &lazy, basis, pending);
      const auto eager_factor = project(onto, b, grad, &eager, basis);
      ASSERT_EQ(lazy, eager);
      for (const auto& d : b.table.host()) {
        const int64_t offset = onto ? d.q_offset : d.p_offset, size = (onto ? d.cols : d.rows) * d.rank;
        for (int64_t i = offset; i < offset + size; ++i) {
          if (std::isnan(lazy_factor[i]) && std::isnan(eager_factor[i])) continue;  // the sum overflows
          ASSERT_EQ(lazy_factor[i], eager_factor[i]);
        }
      }
    }
  }
}

// Expects residual + P Q^T to equal M, the input. P's columns need not be orthonormal.
TEST_P(PowerSgd, ResidualPlusReconstructionIsTheInput) {
  uint32_t seed = 900;
  for (const auto& c : thinned(powersgd_cases(), 6)) {
    SCOPED_TRACE(c.name);
    MatrixBucket b = bucket(c.shapes, c.gap);
    auto grad = normal(b.elements, ++seed), old = normal(b.elements, ++seed, 0.1f), residual = old;
    auto q = normal(b.q_elements, ++seed);
    auto p = project(b, grad, &residual, q);
    auto basis = normal(b.p_elements, ++seed, 0.1f);
    auto own_q = back_project(b, residual, basis, std::vector<int32_t>(c.shapes.size(), 0));
    auto applied = reconstruct(b, basis, own_q, 1.0f, {});
    settle(b, residual, {basis, negated(own_q), {}});
    EXPECT_LT(loss_of(b, grad, old, applied, residual), 1e-6);
  }
}

TEST_P(PowerSgd, NonFiniteGradientsReachTheResultButNoState) {
  // Only matrix 1 of 3 has a non-finite gradient. The other matrices must not change.
  for (float bad : {kNan, kInf, -kInf}) {
    for (auto shapes : {std::vector<MatrixShape>{{40, 48, 4}, {40, 48, 4}, {16, 20, 3}},
                        std::vector<MatrixShape>{{33, 35, 12}, {13, 1035, 12}, {70, 19, 12}}}) {
      MatrixBucket b = bucket(shapes, 1);
      auto grad = normal(b.elements, 1), old = normal(b.elements, 2), q = normal(b.q_elements, 3);
      const auto& hit = b.table.host()[1];
      int64_t at = hit.offset + 7 * hit.cols + 11;
      auto clean_residual = old, clean_p = project(b, grad, &clean_residual, q);
      grad[at] = bad;
      auto residual = old;
      auto p = project(b, grad, &residual, q);

      EXPECT_EQ(residual[at], old[at]) << "the old residual is kept where the gradient is not finite";
      for (int k = 0; k < hit.rank; ++k) EXPECT_FALSE(is_finite(p[hit.p_offset + 7 * hit.rank + k]));
      for (const auto& d : {b.table.host()[0], b.table.host()[2]}) {
        EXPECT_EQ(gather(p, d.p_offset, d.rows * d.rank), gather(clean_p, d.p_offset, d.rows * d.rank));
      }
      for (size_t i = 0; i < residual.size(); ++i) ASSERT_TRUE(is_finite(residual[i]));

      // Any finite P suffices, because orthonormalize() would flag the matrix and leave its P unchanged.
      auto basis = normal(b.p_elements, 4, 0.2f);
      std::vector<int32_t> flags = {0, 1, 0};
      auto own_q = back_project(b, residual, basis, flags);
      for (int64_t i = 0; i < hit.cols * hit.rank; ++i) ASSERT_EQ(own_q[hit.q_offset + i], 0.0f);
      auto applied = reconstruct(b, basis, own_q, 1.0f, flags, &grad, &residual);
      settle(b, residual, {basis, negated(own_q), {}});
      for (int64_t i = 0; i < int64_t{hit.rows} * hit.cols; ++i) {
        int64_t here = hit.offset + i;
        ASSERT_NEAR(residual[here], old[here], 1e-6) << "element " << i;
      }
      for (size_t i = 0; i < residual.size(); ++i) ASSERT_TRUE(is_finite(residual[i]));

      for (int m = 0; m < 3; ++m) {
        const auto& d = b.table.host()[m];
        for (int64_t i = d.offset; i < d.offset + int64_t{d.rows} * d.cols; ++i) {
          ASSERT_EQ(std::isnan(applied[i]), m == 1) << "matrix " << m;
        }
      }
    }
  }
}

TEST_P(PowerSgd, NanOnAnotherRankKeepsThisRanksResidual) {
  MatrixBucket b = bucket({{40, 48, 4}}, 0);
  auto grad = normal(b.elements, 1), old = normal(b.elements, 2), residual = old, q = normal(b.q_elements, 3);
  project(b, grad, &residual, q);
  auto own_q = back_project(b, residual, normal(b.p_elements, 4), {1});
  reconstruct(b, normal(b.p_elements, 4), own_q, 1.0f, {1}, &grad, &residual);
  EXPECT_LT(worst(residual, old, 1.0), 1e-6);
  EXPECT_EQ(own_q, std::vector<float>(own_q.size(), 0.0f));
}

TEST_P(PowerSgd, ResidualsNeverOverflow) {
  // The sum grad + residual overflows. The matrix counts as non-finite, and the stored sum must be finite.
  MatrixBucket b = bucket({{32, 40, 4}}, 0);
  auto grad = normal(b.elements, 1), residual = normal(b.elements, 2), q = normal(b.q_elements, 3);
  grad[100] = FLT_MAX, residual[100] = FLT_MAX / 2;
  auto p = project(b, grad, &residual, q);
  for (int k = 0; k < 4; ++k) EXPECT_FALSE(is_finite(p[100 / 40 * 4 + k]));
  EXPECT_EQ(residual[100], FLT_MAX);
  reconstruct(b, normal(b.p_elements, 4), q, 1.0f, {1}, &grad, &residual);
  for (float e : residual) ASSERT_TRUE(is_finite(e));

  // P is huge, so M - P Q^T overflows or is NaN. The pass writes 0 to such elements.
  residual = normal(b.elements, 2);
  std::vector<float> absurd(b.p_elements, 3e38f);
  absurd[5] = -3e38f;
  settle(b, residual, {absurd, back_project(b, residual, absurd, {0}), {}});
  for (float e : residual) ASSERT_TRUE(is_finite(e));
}

TEST_P(PowerSgd, RunsGiveTheSameBitsForAnyNumberOfThreads) {
  MatrixBucket b = GetParam().simt
                       ? bucket({{30, 70, 4}, {65, 9, 9}}, 1)
                       : bucket({{300, 700, 4}, {64, 2100, 33}, {2100, 64, 9}, {1500, 300, 1}}, 1);
  auto grad = normal(b.elements, 1), old = normal(b.elements, 2), q = normal(b.q_elements, 3);
  auto basis = normal(b.p_elements, 4, 0.05f);
  const Pending pending{basis, normal(b.q_elements, 5, 0.05f), {}};
  testing::expect_same_bits_with_any_threads([&] {
    auto residual = old;
    const auto p = project(b, grad, &residual, q, pending);
    const auto own_q = back_project(b, residual, basis, {});
    const auto onto = project_onto(b, grad, &residual, basis, pending);
    settle(b, residual, pending);
    return testing::Arrays{p, own_q, onto, residual, reconstruct(b, basis, own_q, 0.3f, {})};
  });
}

TEST_P(PowerSgd, EmptyTableDoesNothing) {
  MatrixBucket b = bucket({}, 0);
  project(b, {}, nullptr, {});
  project_onto(b, {}, nullptr, {});
  back_project(b, {}, {}, {});
  reconstruct(b, {}, {}, 1.0f, {});
}

TEST(MatrixTable, RejectsRanksAboveTheMatrixDimensions) {
  Stream stream = Stream::immediate_host();
  for (int32_t rank : {0, -1, 5, 65}) {
    EXPECT_THROW(MatrixTable(stream, {{.rows = 4, .cols = 100, .rank = rank}}), BadInput) << rank;
  }
  EXPECT_THROW(MatrixTable(stream, {{.rows = 600, .cols = 600, .rank = 513}}), BadInput);
  EXPECT_EQ(MatrixTable(stream, {{.rows = 600, .cols = 520, .rank = 512}}).p_elements(), 600 * 512);
}

GW_INSTANTIATE_BACKENDS(PowerSgd);

}  // namespace
}  // namespace gradwire
