// PowerSGD's passes with products computed by a library. Compared with the fused kernels, the residuals are
// equal, the factors agree up to rounding, and non-finite values are treated alike.
#include <fmt/format.h>

#include <limits>

#include "kernels/powersgd/library.h"
#include "tests/kernels/powersgd_fixture.h"
#include "tests/support/thin_products.h"
#include "tests/support/thinned.h"

namespace gradwire::testing {
namespace {

constexpr float kNotANumber = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

class PowerSgdByLibrary : public PowerSgdFixture {
 public:
  // Runs Gradwire's kernels and, between them, the stand-in's products, in this backend's memory.
  void run_products(const MatrixBucket& b, bool onto_p, float* residual, const float* grad,
                    const float* factors, float* out, int32_t* marks, const PendingFactors& pending) {
    const float* m = grad;
    if (residual != nullptr) {
      PowerSgdForm form{
          .table = &b.table, .grad = grad, .residual = residual, .pending = pending, .marks = marks};
      GW_RUN(powersgd_form, form);
      m = residual;
    }
    for (const ThinGemm& gemm : thin_gemms(b.table, onto_p, m, factors, out)) interpret(gemm);
    if (residual == nullptr) return;
    PowerSgdOverwrite overwrite{.table = &b.table, .marks = marks, .value = kNotANumber};
    (onto_p ? overwrite.q : overwrite.p) = out;
    GW_RUN(powersgd_overwrite, overwrite);
  }

  // Returns P, the projection onto Q, or, if `onto_p`, Q, the projection onto P. Updates the residual. With
  // `own`, Gradwire multiplies.
  std::vector<float> by_library(const MatrixBucket& b, const std::vector<float>& grad,
                                std::vector<float>* residual, const std::vector<float>& factors, bool onto_p,
                                const Pending& pending = {}, bool own = false) {
    auto g = array(grad), e = array(residual != nullptr ? *residual : grad), f = array(factors);
    auto out = array<float>(onto_p ? b.q_elements : b.p_elements);
    auto marks = array(std::vector<int32_t>(static_cast<size_t>(b.table.count()), 0));
    OnDevice there(*this, pending);
    const PendingFactors held = residual != nullptr ? there.args() : PendingFactors{};
    float* e_data = residual != nullptr ? e.data() : nullptr;
    if (GetParam().simt) {
      run_products(b, onto_p, e_data, g.data(), f.data(), out.data(), marks.data(), held);
    } else {
      StandInProducts library;
      ThinProducts* const products = own ? nullptr : thin_products(GetParam().device);
      if (onto_p) {
        gradwire::by_library::powersgd_project_onto(stream,
                                                    {.table = &b.table,
                                                     .grad = g.data(),
                                                     .residual = e_data,
                                                     .pending = held,
                                                     .p = f.data(),
                                                     .q = out.data()},
                                                    products, marks.data());
      } else {
        gradwire::by_library::powersgd_project(stream,
                                               {.table = &b.table,
                                                .grad = g.data(),
                                                .residual = e_data,
                                                .pending = held,
                                                .q = f.data(),
                                                .p = out.data()},
                                               products, marks.data());
      }
      stream.synchronize();
    }
    for (auto* a : {&g, &e, &out}) a->expect_guards_intact("by library");
    marks.expect_guards_intact("marks");
    expect_same_bits(g.host(), grad, "grad is read only");
    if (residual != nullptr) *residual = e.host();
    expect_gaps_untouched(b, out.host(), onto_p ? &MatrixDescriptor::q_offset : &MatrixDescriptor::p_offset,
                          [onto_p](const auto& d) { return (onto_p ? d.cols : d.rows) * d.rank; });
    return out.host();
  }

  void SetUp() override {
    if (GetParam().device.is_cuda() && thin_products(GetParam().device) == nullptr)
      GTEST_SKIP() << "cuBLAS cannot be loaded";
  }
};

TEST_P(PowerSgdByLibrary, ResidualMatchesTheFusedPassBitForBitAndFactorsAgree) {
  uint32_t seed = 0;
  for (const auto& c : thinned(powersgd_cases(), 8)) {
    for (bool onto_p : {false, true}) {
      for (int held : {0, 1, 2}) {  // 0: no error feedback; 1: no pending factors; 2: pending factors
        if (GetParam().simt && (onto_p ? held < 2 : held == 0))
          continue;  // these cases run the same kernels as other cases, or no kernels
        SCOPED_TRACE(fmt::format("{}{}, {}", c.name, onto_p ? ", onto P" : "", held));
        const MatrixBucket b = bucket(c.shapes, c.gap);
        const auto grad = normal(b.elements, ++seed), before = normal(b.elements, ++seed);
        const auto factors = normal(onto_p ? b.p_elements : b.q_elements, ++seed);
        Pending pending;
        if (held == 2) {
          pending = {normal(b.p_elements, ++seed, 0.1f), normal(b.q_elements, ++seed), {}};
          pending.flags.assign(c.shapes.size(), 0);
          pending.flags.back() = c.shapes.size() > 1 ? 1 : 0;
        }
        auto fused = before, formed = before;
        auto* fused_residual = held > 0 ? &fused : nullptr;
        const auto want = project(onto_p, b, grad, fused_residual, factors, pending);
        const bool own = !GetParam().simt && seed % 2 == 0;
        const auto got = by_library(b, grad, held > 0 ? &formed : nullptr, factors, onto_p, pending, own);
        expect_same_bits(formed, fused, "residual");
        for (const auto& d : b.table.host()) {
          const int64_t at = onto_p ? d.q_offset : d.p_offset,
                        count = int64_t{onto_p ? d.cols : d.rows} * d.rank;
          EXPECT_LT(worst(gather(got, at, count), gather(want, at, count),
                          std::sqrt(4.0 * (onto_p ? d.rows : d.cols))),
                    1e-5);
        }
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(PowerSgdByLibrary, NonFiniteValuesReachTheFactorButNotTheResidual) {
  const std::vector<MatrixShape> shapes = {{70, 260, 3}, {33, 31, 5}, {20, 1030, 4}, {16, 16, 2}};
  for (bool onto_p : {false, true}) {
    SCOPED_TRACE(onto_p ? "onto P" : "onto Q");
    const MatrixBucket b = bucket(shapes, 4);
    auto grad = normal(b.elements, 1), before = normal(b.elements, 2);
    auto at = [&](size_t matrix, int64_t element) {
      return static_cast<size_t>(b.table.host()[matrix].offset + element);
    };
    grad[at(0, 69 * 260 + 259)] = kNotANumber;  // the last element of the matrix
    grad[at(1, 0)] = -kInfinity;
    // In this matrix, only the sum is infinite. The residual keeps the largest finite value, whose product
    // could be finite.
    grad[at(2, 5 * 1030 + 3)] = 3e38f;
    before[at(2, 5 * 1030 + 3)] = 3e38f;
    auto fused = before, formed = before;
    const auto factors = normal(onto_p ? b.p_elements : b.q_elements, 3, 1e-3f);
    project(onto_p, b, grad, &fused, factors);
    const auto got = by_library(b, grad, &formed, factors, onto_p);
    expect_same_bits(formed, fused, "residual");
    for (size_t matrix = 0; matrix < shapes.size(); ++matrix) {
      const MatrixDescriptor& d = b.table.host()[matrix];
      for (float m : gather(formed, d.offset, int64_t{d.rows} * d.cols)) ASSERT_TRUE(is_finite(m));
      const auto factor =
          gather(got, onto_p ? d.q_offset : d.p_offset, int64_t{onto_p ? d.cols : d.rows} * d.rank);
      for (float x : factor) ASSERT_EQ(is_finite(x), matrix == 3) << "matrix " << matrix;
    }
  }
}

TEST_P(PowerSgdByLibrary, FlaggedMatricesHaveAZeroQ) {
  const MatrixBucket b = bucket({{20, 30, 3}, {12, 50, 2}}, 1);
  auto m = array(normal(b.elements, 1)), p = array(normal(b.p_elements, 2)), q = array<float>(b.q_elements);
  auto flags = array(std::vector<int32_t>{1, 0});
  StandInProducts library;
  gradwire::by_library::powersgd_back_project(
      stream, {.table = &b.table, .m = m.data(), .p = p.data(), .q = q.data(), .flags = flags.data()},
      thin_products(GetParam().device));
  stream.synchronize();
  const auto want = back_project(b, m.host(), p.host(), {1, 0}), got = q.host();
  for (const auto& d : b.table.host()) {
    EXPECT_LT(worst(gather(got, d.q_offset, int64_t{d.cols} * d.rank),
                    gather(want, d.q_offset, int64_t{d.cols} * d.rank), 5.0),
              1e-5);
  }
  EXPECT_EQ(got[b.table.host()[0].q_offset], 0.0f);
}

TEST_P(PowerSgdByLibrary, OverwritesMarkedMatricesOnly) {
  const MatrixBucket b = bucket({{20, 30, 3}, {12, 50, 2}, {300, 7, 5}}, 2);
  for (bool of_q : {false, true}) {
    const auto before = normal(of_q ? b.q_elements : b.p_elements, 1);
    auto factor = array(before);
    auto flags = array(std::vector<int32_t>{1, 0, 1});
    PowerSgdOverwrite args{.table = &b.table, .marks = flags.data(), .value = 2.5f};
    (of_q ? args.q : args.p) = factor.data();
    GW_RUN(powersgd_overwrite, args);
    factor.expect_guards_intact("factor");
    auto want = before;
    PowerSgdOverwrite reference_args = args;
    const std::vector<int32_t> host_flags = {1, 0, 1};
    reference_args.marks = host_flags.data();
    (of_q ? reference_args.q : reference_args.p) = want.data();
    reference::powersgd_overwrite(reference_args);
    expect_same_bits(factor.host(), want, of_q ? "Q" : "P");
  }
}

TEST_P(PowerSgdByLibrary, FormMatchesTheReferenceBitForBit) {
  uint32_t seed = 40;
  for (const auto& c : powersgd_cases()) {
    SCOPED_TRACE(c.name);
    const MatrixBucket b = bucket(c.shapes, c.gap);
    auto grad = normal(b.elements, ++seed), want = normal(b.elements, ++seed);
    grad[b.table.host().back().offset] = kNotANumber;
    auto g = array(grad), e = array(want);
    std::vector<int32_t> want_marks(c.shapes.size(), 0);
    auto marks = array(want_marks);
    PowerSgdForm args{.table = &b.table, .grad = g.data(), .residual = e.data(), .marks = marks.data()};
    GW_RUN(powersgd_form, args);
    e.expect_guards_intact("residual");
    reference::powersgd_form(
        {.table = &b.table, .grad = grad.data(), .residual = want.data(), .marks = want_marks.data()});
    expect_same_bits(e.host(), want, "residual");
    EXPECT_EQ(marks.host(), want_marks);
    EXPECT_EQ(want_marks.back(), 1);
  }
}

GW_INSTANTIATE_BACKENDS(PowerSgdByLibrary);

}  // namespace
}  // namespace gradwire::testing
