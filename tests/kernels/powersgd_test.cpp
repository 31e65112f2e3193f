// PowerSGD's passes: products agree with the double reference for any shape and rank, residuals keep what was
// lost, and non-finite values reach the result but no state.
#include "kernels/powersgd/powersgd.h"

#include <fmt/format.h>

#include <algorithm>
#include <cfloat>
#include <cstring>

#include "kernels/math/bf16.h"
#include "runtime/thread_pool.h"
#include "tests/kernels/backend.h"
#include "tests/kernels/compare.h"

namespace gradwire {
namespace {

using testing::Array;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Shape {
  int32_t rows, cols, rank;
};

// Everything the three passes touch, on the backend. Matrices are `gap` elements apart;
// the gaps must not change.
struct Bucket {
  MatrixTable table;
  int64_t elements = 0, p_elements = 0, q_elements = 0;
};

std::vector<float> gather(const std::vector<float>& all, int64_t offset, int64_t count) {
  return {all.begin() + offset, all.begin() + offset + count};
}

// Largest |got - want| relative to `scale`.
double worst(const std::vector<float>& got, const std::vector<float>& want, double scale) {
  EXPECT_EQ(got.size(), want.size());
  double most = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    double difference = std::fabs(static_cast<double>(got[i]) - want[i]);
    if (std::isnan(difference)) return difference;
    most = std::max(most, difference);
  }
  return most / scale;
}

class PowerSgd : public testing::OpTest {
 public:
  Bucket bucket(const std::vector<Shape>& shapes, int64_t gap) {
    Bucket b;
    std::vector<MatrixDescriptor> matrices;
    for (const auto& s : shapes) {
      matrices.push_back({.offset = b.elements + gap,
                          .p_offset = b.p_elements + gap,
                          .q_offset = b.q_elements + gap,
                          .rows = s.rows,
                          .cols = s.cols,
                          .rank = s.rank,
                          .seed_id = static_cast<int32_t>(matrices.size())});
      b.elements += int64_t{s.rows} * s.cols + gap;
      b.p_elements += int64_t{s.rows} * s.rank + gap;
      b.q_elements += int64_t{s.cols} * s.rank + gap;
    }
    b.elements += gap, b.p_elements += gap, b.q_elements += gap;
    b.table = MatrixTable(stream, std::move(matrices));
    return b;
  }

  std::vector<float> project(const Bucket& b, const std::vector<float>& grad, std::vector<float>* residual,
                             const std::vector<float>& q) {
    auto g = array(grad), e = array(residual != nullptr ? *residual : grad), p = array<float>(b.p_elements);
    auto q_array = array(q);
    PowerSgdProject args{.table = &b.table, .grad = g.data(), .q = q_array.data(), .p = p.data()};
    if (residual != nullptr) args.residual = e.data();
    GW_RUN(powersgd_project, args);
    for (auto* a : {&g, &e, &p}) a->expect_guards_intact("project");
    testing::expect_same_bits(g.host(), grad, "grad is read only");
    if (residual != nullptr) *residual = e.host();
    expect_gaps_untouched(b, p.host(), &MatrixDescriptor::p_offset,
                          [](const auto& d) { return d.rows * d.rank; });
    return p.host();
  }

  std::vector<float> back_project(const Bucket& b, const std::vector<float>& grad,
                                  std::vector<float>* residual, const std::vector<float>& p,
                                  const std::vector<int32_t>& flags) {
    auto g = array(grad), e = array(residual != nullptr ? *residual : grad), q = array<float>(b.q_elements);
    auto p_array = array(p);
    auto f = array(flags);
    PowerSgdBackProject args{.table = &b.table, .grad = g.data(), .p = p_array.data(), .q = q.data()};
    args.flags = flags.empty() ? nullptr : f.data();
    if (residual != nullptr) args.residual = e.data();
    GW_RUN(powersgd_back_project, args);
    for (auto* a : {&g, &e, &q}) a->expect_guards_intact("back_project");
    if (residual != nullptr) *residual = e.host();
    expect_gaps_untouched(b, q.host(), &MatrixDescriptor::q_offset,
                          [](const auto& d) { return d.cols * d.rank; });
    return q.host();
  }

  std::vector<float> project_onto(const Bucket& b, const std::vector<float>& grad,
                                  std::vector<float>* residual, const std::vector<float>& p) {
    auto g = array(grad), e = array(residual != nullptr ? *residual : grad), q = array<float>(b.q_elements);
    auto p_array = array(p);
    PowerSgdProjectOnto args{.table = &b.table, .grad = g.data(), .p = p_array.data(), .q = q.data()};
    if (residual != nullptr) args.residual = e.data();
    GW_RUN(powersgd_project_onto, args);
    for (auto* a : {&g, &e, &q}) a->expect_guards_intact("project_onto");
    testing::expect_same_bits(g.host(), grad, "grad is read only");
    if (residual != nullptr) *residual = e.host();
    expect_gaps_untouched(b, q.host(), &MatrixDescriptor::q_offset,
                          [](const auto& d) { return d.cols * d.rank; });
    return q.host();
  }

  // The last pass where P and Q alternate: `own` is this rank's part of the factor, negated in `lost`, which
  // `which` names; grad is read where a matrix is flagged. Returns the result.
  std::vector<float> reconstruct_turn(const Bucket& b, const std::vector<float>& grad,
                                      const std::vector<float>& p, const std::vector<float>& q, bool which_p,
                                      const std::vector<float>& lost, std::vector<float>* residual,
                                      const std::vector<int32_t>& flags) {
    auto g = array(grad), p_array = array(p), q_array = array(q), lost_array = array(lost),
         e = array(*residual);
    auto f = array(flags);
    GW_RUN(powersgd_reconstruct, (PowerSgdReconstruct{.table = &b.table,
                                                      .p = p_array.data(),
                                                      .q = q_array.data(),
                                                      .grad = g.data(),
                                                      .flags = f.data(),
                                                      .p_lost = which_p ? lost_array.data() : nullptr,
                                                      .q_lost = which_p ? nullptr : lost_array.data(),
                                                      .residual = e.data(),
                                                      .restore = true}));
    for (auto* a : {&g, &e}) a->expect_guards_intact("reconstruct");
    *residual = e.host();
    return g.host();
  }

  std::vector<float> reconstruct(const Bucket& b, const std::vector<float>& p, const std::vector<float>& q,
                                 float scale, const std::vector<int32_t>& flags,
                                 const std::vector<float>* q_lost = nullptr,
                                 std::vector<float>* residual = nullptr) {
    auto g = array<float>(b.elements), p_array = array(p), q_array = array(q);
    auto lost = array(q_lost != nullptr ? *q_lost : q), e = array(residual != nullptr ? *residual : q);
    auto f = array(flags);
    PowerSgdReconstruct args{.table = &b.table, .p = p_array.data(), .q = q_array.data(), .grad = g.data()};
    args.scale = scale;
    args.flags = flags.empty() ? nullptr : f.data();
    if (q_lost != nullptr) args.q_lost = lost.data(), args.residual = e.data();
    GW_RUN(powersgd_reconstruct, args);
    for (auto* a : {&g, &e}) a->expect_guards_intact("reconstruct");
    if (residual != nullptr) *residual = e.host();
    expect_gaps_untouched(b, g.host(), &MatrixDescriptor::offset,
                          [](const auto& d) { return int64_t{d.rows} * d.cols; });
    return g.host();
  }

  // Between the matrices the poison must still be there.
  template <typename Size>
  void expect_gaps_untouched(const Bucket& b, std::vector<float> all, int64_t MatrixDescriptor::*offset,
                             Size size) {
    uint32_t poison = 0xcdcdcdcdu;
    for (const auto& d : b.table.host()) {
      std::fill_n(all.begin() + d.*offset, size(d), bits_float(poison));
    }
    for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(float_bits(all[i]), poison) << "gap element " << i;
  }
};

struct Case {
  const char* name;
  std::vector<Shape> shapes;
  int64_t gap;
};

// Small enough for the CPU shim, yet on both sides of every block boundary of the kernels.
std::vector<Case> cases() {
  return {
      {"one element", {{1, 1, 1}}, 0},
      {"row and column", {{1, 9, 1}, {9, 1, 1}, {1, 1100, 1}, {1100, 1, 1}}, 3},
      {"square, aligned", {{64, 64, 4}, {16, 16, 4}}, 0},
      {"square, odd", {{63, 65, 3}, {33, 31, 5}}, 1},
      {"tall", {{577, 5, 2}, {1290, 9, 7}}, 4},
      {"very tall", {{3000, 8, 4}}, 0},
      {"wide", {{5, 1030, 2}, {7, 1025, 7}, {9, 2052, 4}}, 4},
      {"vit block", {{48, 16, 4}, {16, 16, 4}, {64, 16, 4}, {16, 64, 4}, {10, 16, 4}}, 0},
      {"rank 1", {{36, 260, 1}, {37, 41, 1}}, 2},
      {"rank 2", {{36, 260, 2}, {37, 41, 2}}, 2},
      {"rank 8", {{36, 260, 8}, {37, 41, 8}}, 0},
      {"rank 9", {{36, 44, 9}}, 0},
      {"rank 16", {{16, 1028, 16}, {65, 20, 16}}, 8},
      {"rank 32", {{65, 34, 32}, {32, 32, 32}}, 5},
      {"rank 64", {{64, 68, 64}, {65, 67, 64}}, 0},
      {"mixed ranks", {{20, 60, 1}, {20, 60, 4}, {30, 60, 23}, {40, 41, 40}}, 1},
  };
}

// Sizes of real layers, for the devices that are fast enough.
std::vector<Case> larger_cases() {
  return {
      {"large", {{768, 700, 4}, {16, 4096, 4}, {3500, 12, 4}, {700, 7, 7}}, 4},
      {"large, rank 64", {{100, 260, 64}, {67, 1033, 64}, {300, 2100, 33}}, 0},
  };
}

// Random gradient, residual and Q; gaps hold the poison.
TEST_P(PowerSgd, PassesAgreeWithTheDoubleReference) {
  uint32_t seed = 0;
  auto all = cases();
  if (!GetParam().simt) {
    for (auto& c : larger_cases()) all.push_back(c);
  }
  for (const auto& c : all) {
    for (bool with_residual : {true, false}) {
      SCOPED_TRACE(std::string(c.name) + (with_residual ? ", error feedback" : ""));
      Bucket b = bucket(c.shapes, c.gap);
      auto grad = normal(b.elements, ++seed), residual = normal(b.elements, ++seed);
      auto q = normal(b.q_elements, ++seed);
      auto want_residual = residual, want_p = normal(b.p_elements, 1);
      std::vector<float>* e = with_residual ? &residual : nullptr;
      auto p = project(b, grad, e, q);
      PowerSgdProject project_args{.table = &b.table, .grad = grad.data(), .q = q.data(), .p = want_p.data()};
      if (with_residual) project_args.residual = want_residual.data();
      reference::powersgd_project(project_args);
      ASSERT_EQ(residual, want_residual) << "M = grad + residual is one FP32 addition";

      // A P with columns of norm about 1, as orthonormalize() leaves it.
      auto basis = normal(b.p_elements, ++seed);
      for (const auto& d : b.table.host()) {
        for (int64_t i = 0; i < int64_t{d.rows} * d.rank; ++i)
          basis[d.p_offset + i] /= std::sqrt(float(d.rows));
      }
      auto got_q = back_project(b, grad, e, basis, {});
      auto want_q = normal(b.q_elements, 1);
      PowerSgdBackProject back_args{
          .table = &b.table, .grad = grad.data(), .p = basis.data(), .q = want_q.data()};
      if (with_residual) back_args.residual = want_residual.data();
      reference::powersgd_back_project(back_args);

      auto got_grad = reconstruct(b, basis, want_q, 0.5f, {});
      auto want_grad = normal(b.elements, 1);
      reference::powersgd_reconstruct({.table = &b.table,
                                       .p = basis.data(),
                                       .q = want_q.data(),
                                       .grad = want_grad.data(),
                                       .scale = 0.5f});

      for (const auto& d : b.table.host()) {
        SCOPED_TRACE(fmt::format("matrix of {} x {}", d.rows, d.cols));
        int64_t size = int64_t{d.rows} * d.cols, p_size = int64_t{d.rows} * d.rank,
                q_size = int64_t{d.cols} * d.rank;
        // FP32 sums of n random terms: rounding grows like sqrt(n), and the result is about sqrt(n) as well.
        EXPECT_LT(
            worst(gather(p, d.p_offset, p_size), gather(want_p, d.p_offset, p_size), std::sqrt(2.0 * d.cols)),
            1e-5);
        EXPECT_LT(worst(gather(got_q, d.q_offset, q_size), gather(want_q, d.q_offset, q_size), 1.0), 2e-5);
        EXPECT_LT(worst(gather(got_grad, d.offset, size), gather(want_grad, d.offset, size), 1.0), 1e-5);
        if (with_residual) {
          EXPECT_LT(worst(gather(residual, d.offset, size), gather(want_residual, d.offset, size), 1.0),
                    3e-5);
        }
      }
      if (HasFailure()) return;
    }
  }
}

TEST_P(PowerSgd, ProjectingOntoPAgreesWithTheDoubleReference) {
  uint32_t seed = 500;
  auto all = cases();
  if (!GetParam().simt) {
    for (auto& c : larger_cases()) all.push_back(c);
  }
  for (const auto& c : all) {
    for (bool with_residual : {true, false}) {
      SCOPED_TRACE(std::string(c.name) + (with_residual ? ", error feedback" : ""));
      Bucket b = bucket(c.shapes, c.gap);
      auto grad = normal(b.elements, ++seed), residual = normal(b.elements, ++seed);
      auto p = normal(b.p_elements, ++seed);
      auto want_residual = residual, want_q = normal(b.q_elements, 1);
      auto q = project_onto(b, grad, with_residual ? &residual : nullptr, p);
      PowerSgdProjectOnto args{.table = &b.table, .grad = grad.data(), .p = p.data(), .q = want_q.data()};
      if (with_residual) args.residual = want_residual.data();
      reference::powersgd_project_onto(args);
      ASSERT_EQ(residual, want_residual) << "M = grad + residual is one FP32 addition";
      for (const auto& d : b.table.host()) {
        const int64_t size = int64_t{d.cols} * d.rank;
        ASSERT_LT(
            worst(gather(q, d.q_offset, size), gather(want_q, d.q_offset, size), std::sqrt(2.0 * d.rows)),
            1e-5)
            << d.rows << " x " << d.cols;
      }
    }
  }
}

// Where P and Q alternate, with either of them in this step and whatever the other's columns are.
TEST_P(PowerSgd, InEitherTurnResidualPlusReconstructionIsWhatWentIn) {
  uint32_t seed = 700;
  for (const auto& c : cases()) {
    for (bool turn_p : {true, false}) {
      SCOPED_TRACE(std::string(c.name) + (turn_p ? ", P" : ", Q"));
      Bucket b = bucket(c.shapes, c.gap);
      auto grad = normal(b.elements, ++seed), old = normal(b.elements, ++seed, 0.1f), residual = old;
      const auto basis = normal(turn_p ? b.q_elements : b.p_elements, ++seed, 0.1f);
      const auto own = turn_p ? project(b, grad, &residual, basis) : project_onto(b, grad, &residual, basis);
      auto lost = own;
      for (float& x : lost) x = -x;
      auto applied = reconstruct_turn(b, grad, turn_p ? own : basis, turn_p ? basis : own, turn_p, lost,
                                      &residual, std::vector<int32_t>(c.shapes.size(), 0));
      double in = 0.0, violated = 0.0;
      for (const auto& d : b.table.host()) {
        for (int64_t at = d.offset; at < d.offset + int64_t{d.rows} * d.cols; ++at) {
          const double m = static_cast<double>(grad[at]) + old[at],
                       out = static_cast<double>(applied[at]) + residual[at];
          in += m * m;
          violated += (m - out) * (m - out);
        }
      }
      EXPECT_LT(std::sqrt(violated / in), 1e-6);
    }
  }
}

TEST_P(PowerSgd, InEitherTurnAFlaggedMatrixGetsItsOldResidualBack) {
  for (float bad : {kNan, kInf}) {
    for (bool turn_p : {true, false}) {
      Bucket b = bucket({{40, 48, 4}, {33, 1035, 3}, {16, 20, 12}}, 1);
      const auto& hit = b.table.host()[1];
      auto grad = normal(b.elements, 1), old = normal(b.elements, 2), residual = old;
      const int64_t at = hit.offset + 7 * hit.cols + 11;
      grad[at] = bad;
      const auto basis = normal(turn_p ? b.q_elements : b.p_elements, 3);
      const auto own = turn_p ? project(b, grad, &residual, basis) : project_onto(b, grad, &residual, basis);
      EXPECT_EQ(residual[at], old[at]) << "the old residual stays where the gradient is not finite";
      const int64_t seen = turn_p ? hit.p_offset + 7 * hit.rank : hit.q_offset + 11 * hit.rank;
      for (int k = 0; k < hit.rank; ++k) EXPECT_FALSE(is_finite(own[seen + k]));
      auto lost = own;
      for (float& x : lost) x = -x;
      auto applied = reconstruct_turn(b, grad, turn_p ? own : basis, turn_p ? basis : own, turn_p, lost,
                                      &residual, {0, 1, 0});
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

// With P's columns orthonormal or not: residual + P Q^T is M, which is what went in.
TEST_P(PowerSgd, ResidualPlusReconstructionIsWhatWentIn) {
  uint32_t seed = 900;
  for (const auto& c : cases()) {
    SCOPED_TRACE(c.name);
    Bucket b = bucket(c.shapes, c.gap);
    auto grad = normal(b.elements, ++seed), old = normal(b.elements, ++seed, 0.1f), residual = old;
    auto q = normal(b.q_elements, ++seed);
    auto p = project(b, grad, &residual, q);
    auto basis = normal(b.p_elements, ++seed, 0.1f);
    auto own_q = back_project(b, grad, &residual, basis, std::vector<int32_t>(c.shapes.size(), 0));
    auto applied = reconstruct(b, basis, own_q, 1.0f, {});
    double in = 0.0, violated = 0.0;
    for (const auto& d : b.table.host()) {
      for (int64_t at = d.offset; at < d.offset + int64_t{d.rows} * d.cols; ++at) {
        double m = static_cast<double>(grad[at]) + old[at],
               out = static_cast<double>(applied[at]) + residual[at];
        in += m * m;
        violated += (m - out) * (m - out);
      }
    }
    EXPECT_LT(std::sqrt(violated / in), 1e-6);
  }
}

TEST_P(PowerSgd, NonFiniteGradientsReachTheResultButNoState) {
  // Matrix 1 of 3 is hit; the others must not change.
  for (float bad : {kNan, kInf, -kInf}) {
    for (auto shapes : {std::vector<Shape>{{40, 48, 4}, {40, 48, 4}, {16, 20, 3}},
                        std::vector<Shape>{{33, 35, 12}, {13, 1035, 12}, {70, 19, 12}}}) {
      Bucket b = bucket(shapes, 1);
      auto grad = normal(b.elements, 1), old = normal(b.elements, 2), q = normal(b.q_elements, 3);
      const auto& hit = b.table.host()[1];
      int64_t at = hit.offset + 7 * hit.cols + 11;
      auto clean_residual = old, clean_p = project(b, grad, &clean_residual, q);
      grad[at] = bad;
      auto residual = old;
      auto p = project(b, grad, &residual, q);

      EXPECT_EQ(residual[at], old[at]) << "the old residual stays where the gradient is not finite";
      for (int k = 0; k < hit.rank; ++k) EXPECT_FALSE(is_finite(p[hit.p_offset + 7 * hit.rank + k]));
      for (const auto& d : {b.table.host()[0], b.table.host()[2]}) {
        EXPECT_EQ(gather(p, d.p_offset, d.rows * d.rank), gather(clean_p, d.p_offset, d.rows * d.rank));
      }
      for (size_t i = 0; i < residual.size(); ++i) ASSERT_TRUE(is_finite(residual[i]));

      // orthonormalize() would flag the matrix and leave its P alone; any finite P does here.
      auto basis = normal(b.p_elements, 4, 0.2f);
      std::vector<int32_t> flags = {0, 1, 0};
      auto own_q = back_project(b, grad, &residual, basis, flags);
      for (int64_t i = 0; i < hit.cols * hit.rank; ++i) ASSERT_EQ(own_q[hit.q_offset + i], 0.0f);
      for (int64_t i = 0; i < int64_t{hit.rows} * hit.cols; ++i) {
        int64_t here = hit.offset + i;
        ASSERT_NEAR(residual[here], old[here], 1e-6) << "element " << i;
      }
      for (size_t i = 0; i < residual.size(); ++i) ASSERT_TRUE(is_finite(residual[i]));

      auto applied = reconstruct(b, basis, own_q, 1.0f, flags);
      for (int m = 0; m < 3; ++m) {
        const auto& d = b.table.host()[m];
        for (int64_t i = d.offset; i < d.offset + int64_t{d.rows} * d.cols; ++i) {
          ASSERT_EQ(std::isnan(applied[i]), m == 1) << "matrix " << m;
        }
      }
    }
  }
}

TEST_P(PowerSgd, AnotherRanksNanLeavesThisRanksResidualAsItWas) {
  Bucket b = bucket({{40, 48, 4}}, 0);
  auto grad = normal(b.elements, 1), old = normal(b.elements, 2), residual = old, q = normal(b.q_elements, 3);
  project(b, grad, &residual, q);
  auto own_q = back_project(b, grad, &residual, normal(b.p_elements, 4), {1});
  EXPECT_LT(worst(residual, old, 1.0), 1e-6);
  EXPECT_EQ(own_q, std::vector<float>(own_q.size(), 0.0f));
}

TEST_P(PowerSgd, OverflowNeverEntersTheResidual) {
  // grad + residual overflows: the matrix counts as not finite, and what is stored must be finite.
  Bucket b = bucket({{32, 40, 4}}, 0);
  auto grad = normal(b.elements, 1), residual = normal(b.elements, 2), q = normal(b.q_elements, 3);
  grad[100] = FLT_MAX, residual[100] = FLT_MAX / 2;
  auto p = project(b, grad, &residual, q);
  for (int k = 0; k < 4; ++k) EXPECT_FALSE(is_finite(p[100 / 40 * 4 + k]));
  EXPECT_EQ(residual[100], FLT_MAX);
  back_project(b, grad, &residual, normal(b.p_elements, 4), {1});
  for (float e : residual) ASSERT_TRUE(is_finite(e));

  // M - P Q^T overflows or is NaN, because P is huge: 0 is written.
  residual = normal(b.elements, 2);
  std::vector<float> absurd(static_cast<size_t>(b.p_elements), 3e38f);
  absurd[5] = -3e38f;
  back_project(b, grad, &residual, absurd, {0});
  for (float e : residual) ASSERT_TRUE(is_finite(e));
}

TEST_P(PowerSgd, WhatTheWireLostOfAFactorIsAddedBackThroughTheOther) {
  uint32_t seed = 70;
  for (auto shapes :
       {std::vector<Shape>{{40, 48, 4}, {21, 1030, 3}}, std::vector<Shape>{{64, 100, 64}, {33, 35, 20}}}) {
    Bucket b = bucket(shapes, 1);
    auto p = normal(b.p_elements, ++seed), q = normal(b.q_elements, ++seed),
         lost = normal(b.q_elements, ++seed, 0.01f);
    auto old = normal(b.elements, ++seed), residual = old, want = old, want_grad = old;
    reconstruct(b, p, q, 0.25f, {0, 0}, &lost, &residual);
    reference::powersgd_reconstruct({.table = &b.table,
                                     .p = p.data(),
                                     .q = q.data(),
                                     .grad = want_grad.data(),
                                     .scale = 0.25f,
                                     .q_lost = lost.data(),
                                     .residual = want.data()});
    EXPECT_LT(worst(residual, want, 1.0), 2e-6);
    // A flagged matrix's residual stays.
    auto kept = old;
    reconstruct(b, p, q, 0.25f, {1, 1}, &lost, &kept);
    EXPECT_EQ(kept, old);

    // The same of P, through Q.
    const auto p_lost = normal(b.p_elements, ++seed, 0.01f);
    auto got = old, wanted = old;
    reconstruct_turn(b, old, p, q, true, p_lost, &got, {0, 0});
    reference::powersgd_reconstruct({.table = &b.table,
                                     .p = p.data(),
                                     .q = q.data(),
                                     .grad = want_grad.data(),
                                     .p_lost = p_lost.data(),
                                     .residual = wanted.data()});
    EXPECT_LT(worst(got, wanted, 1.0), 2e-6);
  }
}

TEST_P(PowerSgd, RunsGiveTheSameBitsForAnyNumberOfThreads) {
  Bucket b = GetParam().simt ? bucket({{30, 70, 4}, {65, 9, 9}}, 1)
                             : bucket({{300, 700, 4}, {64, 2100, 9}, {2100, 64, 33}, {129, 131, 1}}, 1);
  auto grad = normal(b.elements, 1), old = normal(b.elements, 2), q = normal(b.q_elements, 3);
  auto basis = normal(b.p_elements, 4, 0.05f);
  struct Result {
    std::vector<float> p, q, residual, grad;
    bool operator==(const Result&) const = default;
  };
  auto run = [&] {
    Result r;
    r.residual = old;
    r.p = project(b, grad, &r.residual, q);
    r.q = back_project(b, grad, &r.residual, basis, {});
    r.grad = reconstruct(b, basis, r.q, 0.3f, {});
    return r;
  };
  int threads = host_threads();
  Result first = run();
  for (int n : {1, 2, 3, 8}) {
    set_host_threads(n);
    EXPECT_TRUE(run() == first) << n << " threads";
  }
  set_host_threads(threads);
}

TEST_P(PowerSgd, AnEmptyTableDoesNothing) {
  Bucket b = bucket({}, 0);
  project(b, {}, nullptr, {});
  project_onto(b, {}, nullptr, {});
  back_project(b, {}, nullptr, {}, {});
  reconstruct(b, {}, {}, 1.0f, {});
}

TEST(MatrixTable, RefusesARankThatTheMatrixCannotHave) {
  Stream stream = Stream::immediate_host();
  for (int32_t rank : {0, -1, 5, 65}) {
    EXPECT_THROW(MatrixTable(stream, {{.rows = 4, .cols = 100, .rank = rank}}), BadInput) << rank;
  }
  EXPECT_THROW(MatrixTable(stream, {{.rows = 100, .cols = 100, .rank = 65}}), BadInput);
  EXPECT_EQ(MatrixTable(stream, {{.rows = 100, .cols = 90, .rank = 64}}).p_elements(), 6400);
}

GW_INSTANTIATE_BACKENDS(PowerSgd);

}  // namespace
}  // namespace gradwire
