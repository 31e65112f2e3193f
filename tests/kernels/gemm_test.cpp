#include "kernels/gemm/gemm.h"

#include <fmt/format.h>

#include <array>
#include <cmath>

#include "runtime/util/error.h"
#include "tests/kernels/gemm_operands.h"
#include "tests/support/expect.h"
#ifdef GRADWIRE_SIMT_TESTS
#include "tests/simt/cublas_stand_in.h"
#endif

namespace gradwire::testing {
namespace {

using Operands = GemmOperands;

class GemmOp : public OpTest {
 public:
  std::vector<float> run(const Operands& o, int64_t misalign = 0) {
    auto a = array(o.a, misalign), b = array(o.b, misalign), c = array(o.c, misalign);
    Gemm g = o.args;
    g.a = a.data(), g.b = b.data(), g.c = c.data();
    GW_RUN(gemm, g);
    c.expect_guards_intact("c");
    return c.host();
  }
  void check(const Operands& o, int64_t misalign = 0, double tolerance = 1e-6) {
    SCOPED_TRACE(o.name());
    // Elements between rows and between products must be unchanged.
    expect_close(run(o, misalign), o.reference(), tolerance, "c",
                 4.0 + std::sqrt(static_cast<double>(o.args.k)));
  }
};

TEST_P(GemmOp, MatchesTheDoubleReferenceForEveryTransposition) {
  struct Size {
    int64_t m, n, k;
  };
  for (Size s : {Size{1, 1, 1}, Size{7, 5, 3}, Size{17, 17, 16}, Size{64, 33, 31}, Size{65, 128, 100},
                 Size{200, 10, 64}, Size{3, 257, 129}}) {
    for (int t = 0; t < 4; ++t) check(Operands(s.m, s.n, s.k, (t & 1) != 0, (t & 2) != 0), t);
  }
}

TEST_P(GemmOp, LargeProductsMatchAtBlockBoundaries) {
  for (int t = 0; t < 4; ++t) check(Operands(270, 1100, 20, (t & 1) != 0, (t & 2) != 0, 1, 3));
  for (int t = 0; t < 4; ++t) check(Operands(515, 200, 120, (t & 1) != 0, (t & 2) != 0, 1, 3));
}

TEST_P(GemmOp, BatchesOfSmallProductsLeaveGapsUnchanged) {
  for (int t = 0; t < 4; ++t) {
    check(Operands(17, 17, 16, (t & 1) != 0, (t & 2) != 0, 37, 7, 11));
    check(Operands(17, 16, 24, (t & 1) != 0, (t & 2) != 0, 9, 0, 0));
    check(Operands(50, 50, 64, (t & 1) != 0, (t & 2) != 0, 5, 6, 1));
    check(Operands(64, 64, 64, (t & 1) != 0, (t & 2) != 0, 2, 0, 0));
    check(Operands(31, 25, 9, (t & 1) != 0, (t & 2) != 0, 4, 1, 3), 3);
    check(Operands(1, 3, 2, (t & 1) != 0, (t & 2) != 0, 3, 1, 5), 1);
    check(Operands(33, 65, 1, (t & 1) != 0, (t & 2) != 0, 2, 0, 0), 1);
  }
}

TEST_P(GemmOp, AlphaAndBetaScaleAndAccumulate) {
  for (int64_t batch : {1, 5}) {
    for (float beta : {0.0f, 1.0f, -0.5f}) {
      Operands o(19, 21, 23, false, true, batch, 2);
      o.args.alpha = 0.25f;
      o.args.beta = beta;
      check(o);
      o.args.transpose_a = false;
    }
  }
}

TEST_P(GemmOp, BetaZeroOverwritesANanInC) {
  for (int64_t batch : {1, 4}) {
    Operands o(20, 20, 20, false, false, batch);
    for (float& x : o.c) x = std::numeric_limits<float>::quiet_NaN();
    check(o);
  }
}

TEST_P(GemmOp, NanInAStaysInItsRow) {
  for (int64_t batch : {1, 2}) {
    Operands o(18, 20, 17, false, false, batch);
    o.a[17 * 4 + 2] = std::numeric_limits<float>::quiet_NaN();
    auto got = run(o);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(std::isnan(got[i]), i / 20 == 4) << i;
  }
}

TEST_P(GemmOp, EmptyProductsDoNothingOrScaleC) {
  for (auto [m, n, k, batch] :
       {std::array<int64_t, 4>{0, 5, 5, 1}, {5, 0, 5, 1}, {5, 5, 5, 0}, {5, 6, 0, 1}, {5, 6, 0, 3}}) {
    for (float beta : {0.0f, 2.0f}) {
      Operands o(m, n, k, false, false, batch);
      o.args.beta = beta;
      check(o);
    }
  }
}

TEST_P(GemmOp, Tf32StaysWithinItsRounding) {
  Operands o(65, 66, 67, false, true);
  o.args.precision = Precision::tf32;
  check(o, 0, 2e-3);
}

TEST_P(GemmOp, AnyNumberOfThreadsGivesTheSameBits) {
  for (const Operands& o : {Operands(1088, 192, 64, false, true), Operands(64, 192, 1088, true, false),
                            Operands(300, 1100, 20, false, true), Operands(260, 1030, 20, true, false, 1, 3),
                            Operands(17, 17, 16, false, true, 256)}) {
    SCOPED_TRACE(o.name());
    expect_same_bits_with_any_threads([&] { return Arrays{run(o)}; });
  }
}

TEST_P(GemmOp, RejectsInvalidLeadingDimensions) {
  Operands o(4, 5, 6, false, false);
  o.args.ldb = 3;
  expect_error<BadInput>([&] { run(o); }, {"ldb is 3"});
}

TEST_P(GemmOp, AddsABiasToEachRow) {
  Operands o(70, 33, 20, false, true);
  auto bias = normal(33, 9);
  auto want = run(o);
  for (size_t i = 0; i < want.size(); ++i) want[i] += bias[i % 33];
  auto d_bias = array(bias);
  o.args.bias = d_bias.data();
  expect_close(run(o), want, 1e-6, "c");
}

TEST_P(GemmOp, AddsABiasWhenKIsZero) {
  const auto bias = normal(6, 9);
  auto d_bias = array(bias);
  for (float beta : {0.0f, 2.0f}) {
    Operands o(5, 6, 0, false, false, 1, 3);
    o.args.beta = beta;
    const auto want = [&] {
      auto scaled = o.reference();
      for (size_t i = 0; i < 5 * 9; ++i) {
        if (i % 9 < 6) scaled[i] += bias[i % 9];
      }
      return scaled;
    }();
    o.args.bias = d_bias.data();
    expect_close(run(o), want, 1e-6, "c");
  }
}

class GemmEpilogue : public OpTest {
 public:
  struct Result {
    std::vector<float> c, aux;
  };
  // Computes y = GELU(x W^T + bias), as in the forward pass, or dy W times GELU's derivative at `aux`. Uses
  // the op's reference if `by_reference`, otherwise the backend.
  template <typename T>
  Result run(Epilogue epilogue, int64_t m, int64_t n, int64_t k, bool with_bias, int64_t misalign,
             bool by_reference, bool keeps_aux = true) {
    auto values = [](int64_t count, uint32_t seed) { return narrowed<T>(normal(count, seed)); };
    const bool forward = epilogue == Epilogue::gelu_tanh;
    auto a = array(values(m * k, 1), misalign), b = array(values(n * k, 2), misalign);
    auto bias = array(values(n, 3), misalign), c = array<T>(m * n, misalign);
    auto aux = forward ? array<T>(m * n, misalign) : array(values(m * n, 4), misalign);
    Gemm g{.transpose_b = forward, .m = m, .n = n, .k = k};
    g.a = a.data(), g.lda = k, g.b = b.data(), g.ldb = forward ? k : n, g.c = c.data(), g.ldc = n;
    g.epilogue = epilogue;
    if (keeps_aux) g.aux = aux.data();
    // This scale puts x in GELU's nonlinear range.
    g.alpha = 1.0f / std::sqrt(static_cast<float>(std::max<int64_t>(1, k)));
    if (with_bias) g.bias = bias.data();
    if (by_reference) {
      const auto host_a = a.host(), host_b = b.host(), host_bias = bias.host();
      auto host_c = c.host(), host_aux = aux.host();
      g.a = host_a.data(), g.b = host_b.data(), g.c = host_c.data(), g.aux = host_aux.data();
      if (with_bias) g.bias = host_bias.data();
      reference::gemm(g);
      return {widened(host_c), widened(host_aux)};
    }
    GW_RUN(gemm, g);
    c.expect_guards_intact("c");
    aux.expect_guards_intact("aux");
    return {widened(c.host()), widened(aux.host())};
  }
  template <typename T>
  void check(Epilogue epilogue, int64_t m, int64_t n, int64_t k, bool with_bias, int64_t misalign) {
    SCOPED_TRACE(fmt::format("{}x{}x{}{}{} {}", m, n, k, with_bias ? " bias" : "",
                             epilogue == Epilogue::gelu_tanh ? " gelu" : " dgelu",
                             std::is_same_v<T, Bf16> ? "bf16" : "fp32"));
    const Result want = run<T>(epilogue, m, n, k, with_bias, misalign, true);
    const Result got = run<T>(epilogue, m, n, k, with_bias, misalign, false);
    // Implementations round x before GELU, after GELU, or both. cuBLASLt's hyperbolic tangent is an
    // approximation with an error of 4e-6 of x on an H100.
    const double unit = std::is_same_v<T, Bf16> ? 1.0 / 128 : 1e-5;
    for (size_t i = 0; i < want.c.size(); ++i) {
      const double x = std::abs(want.aux[i]);
      ASSERT_NEAR(got.c[i], want.c[i], unit * (std::abs(want.c[i]) + x) + 1e-6) << i;
      ASSERT_NEAR(got.aux[i], want.aux[i], unit * x + 1e-6) << i;
    }
    if (epilogue == Epilogue::d_gelu_tanh) expect_same_bits(got.aux, want.aux, "aux");
  }
};

TEST_P(GemmEpilogue, ComputesGeluOfTheProductAndItsDerivative) {
  for (Epilogue epilogue : {Epilogue::gelu_tanh, Epilogue::d_gelu_tanh}) {
    for (bool with_bias : {false, true}) {
      if (with_bias && epilogue == Epilogue::d_gelu_tanh) continue;
      for (int64_t n : {8, 64, 7, 33}) {  // cuBLASLt requires multiples of 8
        check<float>(epilogue, 19, n, 24, with_bias, n % 2);
        check<Bf16>(epilogue, 19, n, 24, with_bias, n % 2);
      }
    }
  }
}

TEST_P(GemmEpilogue, KeepsPreActivationsForBackwardOnly) {
  for (int64_t n : {56, 7}) {  // 56: cuBLASLt; 7: Gradwire's kernel
    const auto with = run<Bf16>(Epilogue::gelu_tanh, 19, n, 24, true, 0, false, true);
    const auto without = run<Bf16>(Epilogue::gelu_tanh, 19, n, 24, true, 0, false, false);
    for (size_t i = 0; i < with.c.size(); ++i)
      ASSERT_NEAR(without.c[i], with.c[i], (std::abs(with.c[i]) + std::abs(with.aux[i])) / 128) << i;
    for (float untouched : without.aux) ASSERT_LT(untouched, -1e8f);  // still poison
  }
}

TEST_P(GemmEpilogue, EmptyProductsWriteNothing) {
  for (Epilogue epilogue : {Epilogue::gelu_tanh, Epilogue::d_gelu_tanh}) {
    check<float>(epilogue, 0, 8, 8, false, 0);
    check<float>(epilogue, 5, 0, 8, false, 0);
    check<float>(epilogue, 5, 8, 0, false, 0);  // GELU of an empty product
  }
}

#ifdef GRADWIRE_SIMT_TESTS
TEST_P(GemmEpilogue, IsOneLaunchIfTheLibrarySupportsItElseTwo) {
  for (Epilogue epilogue : {Epilogue::gelu_tanh, Epilogue::d_gelu_tanh}) {
    const char* own = epilogue == Epilogue::gelu_tanh ? "bias_gelu" : "bias_gelu_backward";
    auto launches = [&](int64_t n) {
      const OpCount count;
      check<Bf16>(epilogue, 11, n, 16, false, 0);
      return count.launches();
    };
    EXPECT_EQ(launches(40), (OpCount::ByName{{"gemm", 1}}));
    EXPECT_EQ(launches(41), (OpCount::ByName{{"gemm", 1}, {own, 1}}));  // 41 is not a multiple of 8
    simt::refuse_gelu_epilogues(true);
    EXPECT_EQ(launches(48), (OpCount::ByName{{"gemm", 1}, {own, 1}}));
    simt::refuse_gelu_epilogues(false);
  }
}
#endif

// Returns the error message of a small product whose arguments `change` has modified.
template <typename Change>
std::string check_message(const Change& change) {
  Gemm g = Operands(4, 5, 6, false, false).args;
  change(g);
  try {
    detail::check(g);
  } catch (const BadInput& e) {
    return e.what();
  }
  return "accepted";
}

TEST(Gemm, RejectsUnsupportedEpilogues) {
  std::vector<float> c(30), aux(30);
  auto message = [&](const auto& change) {
    return check_message([&](Gemm& g) {
      g.c = c.data(), g.epilogue = Epilogue::d_gelu_tanh, g.aux = aux.data();
      change(g);
    });
  };
  Bf16 operand;
  const std::string single = "gemm: an epilogue needs batch = 1, beta = 0 and ldc = n";
  EXPECT_EQ(message([&](Gemm&) {}), "accepted");
  EXPECT_EQ(message([&](Gemm& g) { g.aux = nullptr; }), "gemm: an epilogue needs aux, distinct from c");
  EXPECT_EQ(message([&](Gemm& g) { g.aux = nullptr, g.epilogue = Epilogue::gelu_tanh; }), "accepted");
  EXPECT_EQ(message([&](Gemm& g) { g.aux = c.data(); }), "gemm: an epilogue needs aux, distinct from c");
  EXPECT_EQ(message([&](Gemm& g) { g.aux = &operand; }), "gemm: aux must have c's type");
  EXPECT_EQ(message([&](Gemm& g) { g.batch = 2; }), single);
  EXPECT_EQ(message([&](Gemm& g) { g.beta = 1.0f; }), single);
  EXPECT_EQ(message([&](Gemm& g) { g.ldc = 6; }), single);
  EXPECT_EQ(message([&](Gemm& g) { g.bias = aux.data(); }),
            "gemm: the epilogue d_gelu_tanh takes no bias; set bias to null");
}

TEST(Gemm, RejectsIncompatibleTypes) {
  auto message = [](const auto& change) { return check_message(change); };
  Bf16 operand;
  float number;
  EXPECT_EQ(message([&](Gemm&) {}), "accepted");
  EXPECT_EQ(message([&](Gemm& g) { g.b = &operand; }), "gemm: a and b must have the same type");
  EXPECT_EQ(message([&](Gemm& g) { g.c = &operand; }), "gemm: c can be bf16 only if a and b are");
  EXPECT_EQ(message([&](Gemm& g) { g.bias = &operand; }), "gemm: the bias must have c's type");
  EXPECT_EQ(message([&](Gemm& g) { g.bias = &number, g.batch = 2; }), "gemm: a bias needs batch = 1");
  EXPECT_EQ(message([&](Gemm& g) { g.precision = Precision::bf16; }),
            "gemm: precision must be fp32 or, for FP32 operands, tf32");
  EXPECT_EQ(message([&](Gemm& g) { g.a = &operand, g.b = &operand, g.precision = Precision::tf32; }),
            "gemm: precision must be fp32 or, for FP32 operands, tf32");
  EXPECT_EQ(message([&](Gemm& g) { g.precision = Precision::tf32; }), "accepted");
}

GW_INSTANTIATE_BACKENDS(GemmOp);
GW_INSTANTIATE_BACKENDS(GemmEpilogue);

}  // namespace
}  // namespace gradwire::testing
