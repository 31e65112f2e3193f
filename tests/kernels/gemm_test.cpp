#include "kernels/gemm.h"

#include "kernels/thread_pool.h"
#include "tests/kernels/backend.h"
#include "tests/kernels/compare.h"

namespace gradwire::testing {
namespace {

struct Operands {
  Gemm args;
  std::vector<float> a, b, c;

  // `pad` widens every row by that many elements, and `gap` separates the products of a batch.
  Operands(int64_t m, int64_t n, int64_t k, bool ta, bool tb, int64_t batch = 1, int64_t pad = 0,
           int64_t gap = 0) {
    args.transpose_a = ta, args.transpose_b = tb;
    args.m = m, args.n = n, args.k = k, args.batch = batch;
    args.lda = (ta ? m : k) + pad;
    args.ldb = (tb ? k : n) + pad;
    args.ldc = n + pad;
    args.stride_a = (ta ? k : m) * args.lda + gap;
    args.stride_b = (tb ? n : k) * args.ldb + gap;
    args.stride_c = m * args.ldc + gap;
    a = OpTest::normal(batch * args.stride_a, 1);
    b = OpTest::normal(batch * args.stride_b, 2);
    c = OpTest::normal(batch * args.stride_c, 3);
  }
  std::string name() const {
    return std::to_string(args.m) + "x" + std::to_string(args.n) + "x" + std::to_string(args.k) +
           (args.transpose_a ? " A^T" : " A") + (args.transpose_b ? " B^T" : " B") + " batch " +
           std::to_string(args.batch);
  }
  std::vector<float> reference() const {
    auto out = c;
    Gemm g = args;
    g.a = a.data(), g.b = b.data(), g.c = out.data();
    reference::gemm(g);
    return out;
  }
};

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
    // Elements between the rows and between the products must keep their old values.
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

TEST_P(GemmOp, CutsLargeProductsWithoutSeams) {
  for (int t = 0; t < 4; ++t) check(Operands(515, 200, 120, (t & 1) != 0, (t & 2) != 0, 1, 3));
}

TEST_P(GemmOp, BatchesOfSmallProductsKeepGapsUntouched) {
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

TEST_P(GemmOp, BetaZeroForgetsANanInC) {
  for (int64_t batch : {1, 4}) {
    Operands o(20, 20, 20, false, false, batch);
    for (float& x : o.c) x = std::numeric_limits<float>::quiet_NaN();
    check(o);
  }
}

TEST_P(GemmOp, ANanInAReachesItsRowOnly) {
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
  const int before = host_threads();
  for (const Operands& o : {Operands(1088, 192, 64, false, true), Operands(64, 192, 1088, true, false),
                            Operands(17, 17, 16, false, true, 256)}) {
    auto first = run(o);
    for (int threads : thread_counts()) {
      set_host_threads(threads);
      expect_same_bits(run(o), first, o.name());
    }
    set_host_threads(before);
  }
}

TEST_P(GemmOp, AnImpossibleLeadingDimensionIsBadInputThatNamesIt) {
  Operands o(4, 5, 6, false, false);
  o.args.ldb = 3;
  try {
    run(o);
    FAIL() << "accepted";
  } catch (const BadInput& e) {
    EXPECT_NE(std::string(e.what()).find("ldb is 3"), std::string::npos) << e.what();
  }
}

GW_INSTANTIATE_BACKENDS(GemmOp);

}  // namespace
}  // namespace gradwire::testing
