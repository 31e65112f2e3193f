// PowerSGD that alternates between P and Q. Residuals conserve the input in both kinds of steps.
#include <fmt/format.h>

#include <limits>

#include "tests/kernels/powersgd_fixture.h"
#include "tests/support/thinned.h"

namespace gradwire {
namespace {

using testing::MatrixBucket;
using testing::negated;
using testing::powersgd_cases;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class PowerSgdTurns : public testing::PowerSgdFixture {};

// Expects conservation whether the step sends P or Q. The columns of the other factor are arbitrary.
TEST_P(PowerSgdTurns, ResidualPlusReconstructionIsTheInputInEitherTurn) {
  uint32_t seed = 700;
  for (const auto& c : testing::thinned(powersgd_cases(), 8)) {
    for (bool turn_p : {true, false}) {
      SCOPED_TRACE(std::string(c.name) + (turn_p ? ", P" : ", Q"));
      MatrixBucket b = bucket(c.shapes, c.gap);
      auto grad = normal(b.elements, ++seed), old = normal(b.elements, ++seed, 0.1f), residual = old;
      const auto basis = normal(turn_p ? b.q_elements : b.p_elements, ++seed, 0.1f);
      const auto own = project(!turn_p, b, grad, &residual, basis);
      const std::vector<int32_t> flags(c.shapes.size(), 0);
      auto applied =
          reconstruct(b, turn_p ? own : basis, turn_p ? basis : own, 1.0f, flags, &grad, &residual);
      settle(b, residual, {turn_p ? negated(own) : basis, turn_p ? basis : negated(own), flags});
      EXPECT_LT(testing::loss_of(b, grad, old, applied, residual), 1e-6);
    }
  }
}

TEST_P(PowerSgdTurns, FlaggedMatricesKeepTheirOldResidualInEitherTurn) {
  for (float bad : {kNan, kInf}) {
    for (bool turn_p : {true, false}) {
      MatrixBucket b = bucket({{40, 48, 4}, {33, 1035, 3}, {16, 20, 12}}, 1);
      const auto& hit = b.table.host()[1];
      auto grad = normal(b.elements, 1), old = normal(b.elements, 2), residual = old;
      const int64_t at = hit.offset + 7 * hit.cols + 11;
      grad[at] = bad;
      const auto basis = normal(turn_p ? b.q_elements : b.p_elements, 3);
      const auto own = project(!turn_p, b, grad, &residual, basis);
      EXPECT_EQ(residual[at], old[at]) << "the old residual is kept where the gradient is not finite";
      const int64_t seen = turn_p ? hit.p_offset + 7 * hit.rank : hit.q_offset + 11 * hit.rank;
      for (int k = 0; k < hit.rank; ++k) EXPECT_FALSE(is_finite(own[seen + k]));
      const std::vector<int32_t> flags = {0, 1, 0};
      auto applied =
          reconstruct(b, turn_p ? own : basis, turn_p ? basis : own, 1.0f, flags, &grad, &residual);
      settle(b, residual, {turn_p ? negated(own) : basis, turn_p ? basis : negated(own), flags});
      for (int64_t i = 0; i < int64_t{hit.rows} * hit.cols; ++i) {
        ASSERT_NEAR(residual[hit.offset + i], old[hit.offset + i], 1e-6) << "element " << i;
        ASSERT_TRUE(std::isnan(applied[hit.offset + i]));
      }
      for (int m : {0, 2}) {
        const auto& d = b.table.host()[m];
        for (int64_t i = d.offset; i < d.offset + int64_t{d.rows} * d.cols; ++i) {
          ASSERT_TRUE(is_finite(residual[i]) && is_finite(applied[i])) << "matrix " << m;
        }
      }
    }
  }
}

// Expects a NaN in every column of Q. For each eight columns of P, a kernel may reread M from the residual,
// which never contains a NaN.
TEST_P(PowerSgdTurns, NonFiniteGradientsSpreadOverTheirRowOfQOnly) {
  for (float bad : {kNan, kInf, -kInf}) {
    for (int rank : {1, 2, 3, 4, 5, 8, 9, 12, 16, 17, 24, 33}) {
      SCOPED_TRACE(fmt::format("{} at rank {}", bad, rank));
      MatrixBucket b = bucket({{40, 37, rank}}, 1);
      const auto& d = b.table.host()[0];
      auto grad = normal(b.elements, 1), residual = normal(b.elements, 2);
      const int hit = 11;
      grad[d.offset + 7 * d.cols + hit] = bad;
      const auto q = project_onto(b, grad, &residual, normal(b.p_elements, 3));
      for (int column = 0; column < d.cols; ++column) {
        for (int k = 0; k < rank; ++k)
          EXPECT_EQ(is_finite(q[d.q_offset + column * rank + k]), column != hit)
              << "row " << column << " of Q, " << k;
      }
    }
  }
}

GW_INSTANTIATE_BACKENDS(PowerSgdTurns);

}  // namespace
}  // namespace gradwire
