// Dion's second factor: columns of length 1, and the same times a factor of the matrix's shape.
#include "kernels/powersgd/orthonormalize.h"

#include "tests/kernels/powersgd_fixture.h"

namespace gradwire::testing {
namespace {

class NormalizeColumnsTest : public PowerSgdFixture {};

TEST_P(NormalizeColumnsTest, AgreesWithTheReferenceAndSkipsFlaggedMatrices) {
  for (const auto& c : powersgd_cases()) {
    SCOPED_TRACE(c.name);
    const MatrixBucket b = bucket(c.shapes, c.gap);
    auto r = normal(b.q_elements, 7);
    std::vector<int32_t> flags(c.shapes.size(), 0);
    if (flags.size() > 1) flags.back() = 1;
    for (const bool orthonormal : {false, true}) {
      const auto v = normal(b.q_elements, 8);
      auto q = array(r), basis = array(v);
      auto f = array(flags);
      const NormalizeColumns args{.table = &b.table,
                                  .q = q.data(),
                                  .basis = basis.data(),
                                  .flags = f.data(),
                                  .orthonormal = orthonormal};
      GW_RUN(normalize_columns, args);
      q.expect_guards_intact("q");
      basis.expect_guards_intact("basis");
      auto want = r, want_basis = v;
      reference::normalize_columns({.table = &b.table,
                                    .q = want.data(),
                                    .basis = want_basis.data(),
                                    .flags = flags.data(),
                                    .orthonormal = orthonormal});
      EXPECT_LT(worst(q.host(), want, 1.0), 1e-6);
      EXPECT_LT(worst(basis.host(), want_basis, 1.0), 1e-6);
    }
  }
}

TEST_P(NormalizeColumnsTest, ColumnsHaveLengthOneOrZero) {
  const MatrixBucket b = bucket({{30, 90, 5}}, 0);
  auto r = normal(b.q_elements, 7);
  for (size_t at = 2; at < r.size(); at += 5) r[at] = 0.0f;
  auto q = array(r), basis = array<float>(b.q_elements);
  auto f = array(std::vector<int32_t>{0});
  const NormalizeColumns args{.table = &b.table, .q = q.data(), .basis = basis.data(), .flags = f.data()};
  GW_RUN(normalize_columns, args);
  const auto got = basis.host(), scaled = q.host();
  for (size_t k = 0; k < 5; ++k) {
    double squares = 0;
    for (size_t at = k; at < got.size(); at += 5) {
      squares += static_cast<double>(got[at]) * got[at];
      EXPECT_NEAR(scaled[at], got[at] * std::sqrt(30.0 / 90.0), 1e-6);
    }
    EXPECT_NEAR(squares, k == 2 ? 0.0 : 1.0, 1e-5) << k;
  }
}

TEST_P(NormalizeColumnsTest, OrthonormalColumnsAreKeptExceptWhereRIsZero) {
  const MatrixBucket b = bucket({{30, 90, 5}}, 0);
  auto r = normal(b.q_elements, 7);
  for (size_t at = 2; at < r.size(); at += 5) r[at] = 0.0f;
  const auto v = normal(b.q_elements, 8);
  auto q = array(r), basis = array(v);
  auto f = array(std::vector<int32_t>{0});
  const NormalizeColumns args{
      .table = &b.table, .q = q.data(), .basis = basis.data(), .flags = f.data(), .orthonormal = true};
  GW_RUN(normalize_columns, args);
  EXPECT_EQ(basis.host(), v);
  const auto scaled = q.host();
  for (size_t at = 0; at < v.size(); ++at)
    EXPECT_NEAR(scaled[at], at % 5 == 2 ? 0.0 : v[at] * std::sqrt(30.0 / 90.0), 1e-6);
}

GW_INSTANTIATE_BACKENDS(NormalizeColumnsTest);

}  // namespace
}  // namespace gradwire::testing
