// Orthonormalization. The columns of the result are orthonormal and span the input's column space. A matrix
// that is not finite is flagged and unchanged.
#include "kernels/powersgd/orthonormalize.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/threads/thread_pool.h"
#include "tests/kernels/backend.h"
#include "tests/kernels/compare.h"

namespace gradwire {
namespace {

struct Shape {
  int32_t n, rank;
};

using Matrix = std::vector<float>;  // (n, rank), row-major

// Returns the largest absolute entry of A^T A - 1, in double.
double orthogonality_error(const Matrix& a, int32_t n, int r) {
  double most = 0.0;
  for (int i = 0; i < r; ++i) {
    for (int j = 0; j <= i; ++j) {
      double sum = i == j ? -1.0 : 0.0;
      for (int32_t row = 0; row < n; ++row) sum += static_cast<double>(a[row * r + i]) * a[row * r + j];
      if (std::isnan(sum)) return sum;
      most = std::max(most, std::fabs(sum));
    }
  }
  return most;
}

// Returns the largest distance of a column of `a` from the span of `basis` (orthonormal), relative to the
// largest column.
double outside_span(const Matrix& a, const Matrix& basis, int32_t n, int r) {
  double most = 0.0, largest = 0.0;
  for (int k = 0; k < r; ++k) {
    std::vector<double> left(n);
    double norm = 0.0, rest = 0.0;
    for (int32_t i = 0; i < n; ++i) left[i] = a[i * r + k], norm += left[i] * left[i];
    for (int j = 0; j < r; ++j) {
      double along = 0.0;
      for (int32_t i = 0; i < n; ++i) along += static_cast<double>(a[i * r + k]) * basis[i * r + j];
      for (int32_t i = 0; i < n; ++i) left[i] -= along * basis[i * r + j];
    }
    for (double x : left) rest += x * x;
    most = std::max(most, rest);
    largest = std::max(largest, norm);
  }
  return std::sqrt(most / largest);
}

// Returns random orthonormal columns in double, by Gram-Schmidt twice.
std::vector<double> random_basis(int32_t n, int r, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  std::vector<double> a(static_cast<size_t>(n) * r);
  for (auto& x : a) x = normal(generator);
  for (int k = 0; k < r; ++k) {
    for (int round = 0; round < 2; ++round) {
      for (int j = 0; j < k; ++j) {
        double along = 0.0;
        for (int32_t i = 0; i < n; ++i) along += a[i * r + k] * a[i * r + j];
        for (int32_t i = 0; i < n; ++i) a[i * r + k] -= along * a[i * r + j];
      }
    }
    double norm = 0.0;
    for (int32_t i = 0; i < n; ++i) norm += a[i * r + k] * a[i * r + k];
    for (int32_t i = 0; i < n; ++i) a[i * r + k] /= std::sqrt(norm);
  }
  return a;
}

// Returns U diag(1 .. 1/condition) V^T with random orthonormal U and V.
Matrix with_condition(int32_t n, int r, double condition, uint32_t seed) {
  auto u = random_basis(n, r, seed), v = random_basis(r, r, seed + 1);
  Matrix a(static_cast<size_t>(n) * r);
  for (int32_t i = 0; i < n; ++i) {
    for (int k = 0; k < r; ++k) {
      double sum = 0.0;
      for (int j = 0; j < r; ++j) {
        double singular = r == 1 ? 1.0 : std::pow(condition, -static_cast<double>(j) / (r - 1));
        sum += u[i * r + j] * singular * v[k * r + j];
      }
      a[i * r + k] = static_cast<float>(sum);
    }
  }
  return a;
}

class OrthonormalizeTest : public testing::OpTest {
 public:
  struct Options {
    Factor which = Factor::p;
    bool in_place = true, keep_flags = false;
    uint64_t seed = 1, step = 0;
    int64_t gap = 0;
    std::vector<int32_t> flags = {};  // initial values; if empty, flags are poison
  };
  struct Result {
    std::vector<Matrix> out;
    std::vector<int32_t> flags;
    bool operator==(const Result&) const = default;
  };

  Result run(const std::vector<Shape>& shapes, const std::vector<Matrix>& matrices, const Options& o) {
    std::vector<MatrixDescriptor> descriptors;
    std::vector<float> all(o.gap, 7.0f);
    for (size_t m = 0; m < shapes.size(); ++m) {
      MatrixDescriptor d{.rows = shapes[m].n, .cols = shapes[m].n, .rank = shapes[m].rank};
      d.seed_id = static_cast<int32_t>(m);
      (o.which == Factor::p ? d.p_offset : d.q_offset) = static_cast<int64_t>(all.size());
      (o.which == Factor::p ? d.cols : d.rows) = kMaxPowerSgdRank;
      descriptors.push_back(d);
      all.insert(all.end(), matrices[m].begin(), matrices[m].end());
      all.insert(all.end(), o.gap, 7.0f);
    }
    MatrixTable table(stream, descriptors);
    auto in = array(all), out = array(std::vector<float>(all.size(), 7.0f));
    auto flags = array<int32_t>(table.count());
    if (!o.flags.empty()) flags.set(o.flags);
    auto step = array(std::vector<uint64_t>{o.step});
    Orthonormalize args{
        .table = &table, .which = o.which, .in = in.data(), .out = o.in_place ? in.data() : out.data()};
    args.flags = flags.data();
    args.keep_flags = o.keep_flags;
    args.seed = o.seed;
    args.step = step.data();
    auto scratch = array<double>(table.scratch_doubles());
    args.scratch = scratch.data();
    GW_RUN(orthonormalize, args);
    for (auto* a : {&in, &out}) a->expect_guards_intact("matrices");
    scratch.expect_guards_intact("scratch");
    flags.expect_guards_intact("flags");
    if (!o.in_place) {
      testing::expect_same_bits(in.host(), all, "in is read only");
    }
    Result result{{}, flags.host()};
    auto after = (o.in_place ? in : out).host();
    int64_t at = o.gap;
    for (const auto& s : shapes) {
      result.out.emplace_back(after.begin() + at, after.begin() + at + int64_t{s.n} * s.rank);
      at += int64_t{s.n} * s.rank;
      for (int64_t i = 0; i < o.gap; ++i) EXPECT_EQ(after[at + i], 7.0f) << "gap written";
      at += o.gap;
    }
    return result;
  }
  Result run(const std::vector<Shape>& shapes, const std::vector<Matrix>& matrices) {
    return run(shapes, matrices, Options());
  }

  // Compares with the reference on random matrices of several magnitudes.
  void expect_reference(const std::vector<Shape>& shapes) {
    std::vector<Matrix> matrices;
    uint32_t seed = 0;
    for (const auto& s : shapes) {
      ++seed;
      float scale = seed % 3 == 0 ? 1e-20f : seed % 3 == 1 ? 1.0f : 1e15f;
      matrices.push_back(normal(int64_t{s.n} * s.rank, seed, scale));
    }
    for (Factor which : {Factor::p, Factor::q}) {
      for (bool in_place : {true, false}) {
        Options o{.which = which, .in_place = in_place, .gap = in_place ? 0 : 3};
        auto got = run(shapes, matrices, o);
        auto want = reference_result(shapes, matrices, o);
        for (size_t m = 0; m < shapes.size(); ++m) {
          SCOPED_TRACE(fmt::format("{} x {}", shapes[m].n, shapes[m].rank));
          EXPECT_EQ(got.flags[m], 0);
          EXPECT_LT(orthogonality_error(got.out[m], shapes[m].n, shapes[m].rank), 2e-7);
          for (size_t i = 0; i < got.out[m].size(); ++i)
            ASSERT_NEAR(got.out[m][i], want.out[m][i], 1e-6) << i;
        }
      }
    }
  }

  static Result reference_result(const std::vector<Shape>& shapes, std::vector<Matrix> matrices,
                                 const Options& o) {
    Result result;
    for (size_t m = 0; m < shapes.size(); ++m) {
      MatrixDescriptor d{.rows = shapes[m].n,
                         .cols = kMaxPowerSgdRank,
                         .rank = shapes[m].rank,
                         .seed_id = static_cast<int32_t>(m)};
      MatrixTable table(Stream::immediate_host(), {d});
      int32_t flag = -1;
      reference::orthonormalize({.table = &table,
                                 .in = matrices[m].data(),
                                 .out = matrices[m].data(),
                                 .flags = &flag,
                                 .seed = o.seed,
                                 .step = &o.step});
      result.flags.push_back(flag);
    }
    result.out = matrices;
    return result;
  }
};

const std::vector<Shape> kShapes = {{1, 1},    {2, 1},   {2, 2},    {5, 3},    {64, 64}, {65, 64},  {33, 32},
                                    {129, 16}, {255, 7}, {1000, 4}, {1025, 1}, {768, 8}, {300, 33}, {7, 5}};

// Ranks above kMaxSmallRank: whole tiles and parts, next to small ranks in one table.
const std::vector<Shape> kLargeShapes = {{65, 65}, {200, 65}, {40, 4}, {129, 128}, {260, 129}, {150, 100}};

TEST_P(OrthonormalizeTest, AgreesWithTheReferenceOnRandomMatrices) {
  for (const auto& shapes : {kShapes, kLargeShapes}) expect_reference(shapes);
}

TEST_P(OrthonormalizeTest, IsOrthonormalUpToTheLargestRank) {
  if (GetParam().simt) GTEST_SKIP() << "takes minutes";
  const std::vector<Shape> shapes = {
      {700, kMaxPowerSgdRank}, {kMaxPowerSgdRank, kMaxPowerSgdRank}, {1024, 256}};
  std::vector<Matrix> matrices;
  for (const Shape& s : shapes) {
    matrices.push_back(normal(int64_t{s.n} * s.rank, static_cast<uint32_t>(matrices.size()) + 9));
  }
  const auto got = run(shapes, matrices);
  for (size_t m = 0; m < shapes.size(); ++m) {
    EXPECT_EQ(got.flags[m], 0);
    EXPECT_LT(orthogonality_error(got.out[m], shapes[m].n, shapes[m].rank), 2e-7) << m;
  }
}

// All columns are dependent but the first 40 or none, and the draws equal the reference's.
TEST_P(OrthonormalizeTest, ReseedsDeficientColumnsOfLargeMatrices) {
  const Shape s{150, 80};
  for (const int independent : {40, 0}) {
    Matrix a = normal(int64_t{s.n} * s.rank, 3);
    for (int32_t i = 0; i < s.n; ++i) {
      for (int k = independent; k < s.rank; ++k) {
        a[i * s.rank + k] = independent == 0 ? 0.0f : 2.0f * a[i * s.rank + k % independent];
      }
    }
    const Options o{.seed = 77, .step = 9};
    const auto got = run({s}, {a}, o), want = reference_result({s}, {a}, o);
    EXPECT_LT(orthogonality_error(got.out[0], s.n, s.rank), 1e-7);
    for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(got.out[0][i], want.out[0][i], 1e-5) << i;
  }
}

TEST_P(OrthonormalizeTest, HoldsUpToConditionNumber1e8) {
  std::vector<Shape> shapes;
  std::vector<Matrix> matrices;
  for (double condition : {1e1, 1e2, 1e4, 1e6, 1e7, 1e8}) {
    for (Shape s : {Shape{512, 32}, Shape{100, 4}, Shape{64, 64}, Shape{160, 70}}) {
      shapes.push_back(s);
      matrices.push_back(with_condition(s.n, s.rank, condition, static_cast<uint32_t>(shapes.size())));
    }
  }
  auto got = run(shapes, matrices);
  for (size_t m = 0; m < shapes.size(); ++m) {
    EXPECT_LT(orthogonality_error(got.out[m], shapes[m].n, shapes[m].rank), 1e-7) << m;
    EXPECT_LT(outside_span(matrices[m], got.out[m], shapes[m].n, shapes[m].rank), 2e-7) << m;
  }
}

// Tests columns that are zero or linearly dependent. The independent columns keep their span. The other
// columns are orthogonal to that span and equal the reference's draws.
TEST_P(OrthonormalizeTest, ReseedsDeficientColumns) {
  Shape s{200, 6};
  auto base = normal(int64_t{s.n} * s.rank, 3);
  auto edit = [&](auto column_value) {
    Matrix a = base;
    for (int32_t i = 0; i < s.n; ++i) {
      for (int k = 0; k < s.rank; ++k) a[i * s.rank + k] = column_value(i, k);
    }
    return a;
  };
  auto at = [&](int32_t i, int k) { return base[i * s.rank + k]; };
  std::vector<Matrix> matrices = {
      edit([&](int32_t i, int k) { return k == 2 ? 0.0f : at(i, k); }),  // column 2 is zero
      edit([&](int32_t i, int k) { return k == 0 ? 0.0f : at(i, k); }),  // column 0 is zero
      // column 4 is a multiple of column 1
      edit([&](int32_t i, int k) { return k == 4 ? 2.0f * at(i, 1) : at(i, k); }),
      edit([&](int32_t i, int k) { return k >= 3 ? at(i, k - 3) : at(i, k); }),  // the rank is 3 of 6
      edit([&](int32_t i, int) { return at(i, 0); }),                            // the rank is 1 of 6
      edit([&](int32_t, int) { return 0.0f; }),                                  // all columns are zero
      // column 5 has one tiny element
      edit([&](int32_t i, int k) { return i == 0 && k == 5 ? 1e-30f : 0.0f; }),
  };
  std::vector<Shape> shapes(matrices.size(), s);
  for (uint64_t step : {uint64_t{0}, uint64_t{9}}) {
    Options o{.seed = 77, .step = step};
    auto got = run(shapes, matrices, o);
    auto want = reference_result(shapes, matrices, o);
    for (size_t m = 0; m < matrices.size(); ++m) {
      SCOPED_TRACE(fmt::format("matrix {}", m));
      EXPECT_EQ(got.flags[m], 0);
      EXPECT_LT(orthogonality_error(got.out[m], s.n, s.rank), 1e-7);
      if (m != 5) {
        EXPECT_LT(outside_span(matrices[m], got.out[m], s.n, s.rank), 2e-7);
      }
      for (size_t i = 0; i < got.out[m].size(); ++i) ASSERT_NEAR(got.out[m][i], want.out[m][i], 1e-5) << i;
    }
  }
}

TEST_P(OrthonormalizeTest, ZeroMatricesOfAnyShapeGetRandomDirections) {
  std::vector<Matrix> zeros;
  for (const auto& s : kShapes) zeros.emplace_back(static_cast<size_t>(s.n) * s.rank, 0.0f);
  auto got = run(kShapes, zeros), again = run(kShapes, zeros);
  auto other_step = run(kShapes, zeros, {.step = 1}), other_seed = run(kShapes, zeros, {.seed = 2});
  EXPECT_TRUE(got == again);
  for (size_t m = 0; m < kShapes.size(); ++m) {
    EXPECT_LT(orthogonality_error(got.out[m], kShapes[m].n, kShapes[m].rank), 2e-7) << m;
    if (kShapes[m].n == 1) continue;  // a 1 x 1 matrix gives +1 or -1
    EXPECT_NE(got.out[m], other_step.out[m]);
    EXPECT_NE(got.out[m], other_seed.out[m]);
  }
}

TEST_P(OrthonormalizeTest, ExtremeMagnitudesNeitherOverflowNorVanish) {
  Shape s{50, 3};
  std::vector<Matrix> matrices;
  for (float scale : {1e-44f, 1e-38f, 1e37f}) matrices.push_back(normal(int64_t{s.n} * s.rank, 5, scale));
  auto mixed = normal(int64_t{s.n} * s.rank, 6);
  for (int32_t i = 0; i < s.n; ++i) mixed[i * 3] *= 1e30f, mixed[i * 3 + 2] *= 1e-30f;
  matrices.push_back(mixed);
  auto got = run({s, s, s, s}, matrices);
  for (size_t m = 0; m < matrices.size(); ++m) {
    EXPECT_EQ(got.flags[m], 0);
    EXPECT_LT(orthogonality_error(got.out[m], s.n, s.rank), 1e-7) << m;
  }
}

TEST_P(OrthonormalizeTest, FlagsNonFiniteMatricesWithoutChangingThem) {
  for (const Shape s : {Shape{90, 4}, Shape{90, 66}}) {
    for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      for (bool in_place : {true, false}) {
        std::vector<Matrix> matrices;
        for (uint32_t m = 0; m < 3; ++m) matrices.push_back(normal(int64_t{s.n} * s.rank, m));
        auto clean = run({s, s, s}, matrices, {.in_place = in_place});
        matrices[1].back() = bad;
        auto got = run({s, s, s}, matrices, {.in_place = in_place});
        EXPECT_EQ(got.flags, (std::vector<int32_t>{0, 1, 0}));
        EXPECT_EQ(got.out[0], clean.out[0]);
        EXPECT_EQ(got.out[2], clean.out[2]);
        auto untouched = in_place ? matrices[1] : Matrix(matrices[1].size(), 7.0f);
        EXPECT_EQ(memcmp(got.out[1].data(), untouched.data(), untouched.size() * sizeof(float)), 0);
      }
    }
  }
}

TEST_P(OrthonormalizeTest, KeepFlagsNeverClearsAFlag) {
  for (const Shape s : {Shape{90, 4}, Shape{90, 66}}) {
    std::vector<Matrix> matrices;
    for (uint32_t m = 0; m < 3; ++m) matrices.push_back(normal(int64_t{s.n} * s.rank, m));
    matrices[2][5] = std::numeric_limits<float>::quiet_NaN();
    auto got = run({s, s, s}, matrices, {.keep_flags = true, .flags = {0, 1, 0}});
    EXPECT_EQ(got.flags, (std::vector<int32_t>{0, 1, 1}));
    EXPECT_EQ(got.out[1], matrices[1]) << "flagged before: unchanged";
    EXPECT_LT(orthogonality_error(got.out[0], s.n, s.rank), 1e-7);
    // Without keep_flags, the op ignores an old flag.
    got = run({s, s, s}, matrices, {.flags = {1, 1, 1}});
    EXPECT_EQ(got.flags, (std::vector<int32_t>{0, 0, 1}));
  }
}

TEST_P(OrthonormalizeTest, RunsGiveTheSameBitsForAnyNumberOfThreads) {
  std::vector<Matrix> matrices;
  uint32_t seed = 40;
  auto shapes = kShapes;
  shapes.insert(shapes.end(), kLargeShapes.begin(), kLargeShapes.end());
  for (const auto& s : shapes) matrices.push_back(normal(int64_t{s.n} * s.rank, ++seed));
  auto first = run(shapes, matrices);
  int threads = host_threads();
  for (int n : testing::thread_counts()) {
    set_host_threads(n);
    EXPECT_TRUE(run(shapes, matrices) == first) << n << " threads";
  }
  set_host_threads(threads);
  EXPECT_TRUE(run({}, {}) == Result());
}

GW_INSTANTIATE_BACKENDS(OrthonormalizeTest);

}  // namespace
}  // namespace gradwire
