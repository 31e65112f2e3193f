// Products of BF16 matrices, and the host's implementations of these products.
#include "kernels/gemm/bf16_gemm.h"

#include <fmt/format.h>

#include <cmath>
#include <random>

#include "tests/kernels/gemm_operands.h"
#include "tests/support/thinned.h"
#ifdef GRADWIRE_SIMT_TESTS
#include "tests/simt/cublas_stand_in.h"
#endif

namespace gradwire::testing {
namespace {

using Operands = GemmOperands;

// Fixture for products of BF16 matrices. Products of BF16 numbers are exact in FP32, so the only errors are
// those of the sum and of rounding C.
class Bf16Gemm : public OpTest {
 public:
  void TearDown() override {
    host::use_bf16_products(before_);
    OpTest::TearDown();
  }

  // Compares products with the reference. On the host, tests each implementation.
  template <typename Out>
  void check(const Operands& o, bool with_bias, int64_t misalign = 0) {
    for (auto way : {host::Bf16Products::widened, host::Bf16Products::avx512_emulated,
                     host::Bf16Products::amx_emulated, before_}) {
      host::use_bf16_products(way);
      check_as_set<Out>(o, with_bias, misalign);
    }
  }

 private:
  template <typename Out>
  void check_as_set(Operands o, bool with_bias, int64_t misalign) {
    SCOPED_TRACE(o.name() + (std::is_same_v<Out, float> ? " to fp32" : " to bf16"));
    const auto a = narrowed<Bf16>(o.a), b = narrowed<Bf16>(o.b);
    const auto c = narrowed<Out>(o.c), bias = narrowed<Out>(normal(o.args.n, 4));
    o.a = widened(a), o.b = widened(b), o.c = widened(c);
    auto want = o.reference();
    for (int64_t row = 0; with_bias && row < o.args.m; ++row) {
      for (int64_t col = 0; col < o.args.n; ++col) want[row * o.args.ldc + col] += widen(bias[col]);
    }
    auto d_a = array(a, misalign), d_b = array(b, misalign);
    auto d_c = array(c, misalign), d_bias = array(bias, misalign);
    Gemm g = o.args;
    g.a = d_a.data(), g.b = d_b.data(), g.c = d_c.data();
    if (with_bias) g.bias = d_bias.data();
    GW_RUN(gemm, g);
    d_c.expect_guards_intact("c");
    const std::vector<float> got = widened(d_c.host());
    const double size = 4.0 + std::sqrt(static_cast<double>(o.args.k));
    // The tolerance is 2^-8 of the value for rounding, plus the error of the FP32 sum. If cuBLASLt splits k,
    // it rounds the sum of the parts before adding the bias (cuBLAS 13.1 on an H100: 65x33x40 in 16 parts).
    const bool twice = with_bias && !std::is_same_v<Out, float> && !GetParam().device.is_host();
    for (size_t i = 0; i < got.size(); ++i) {
      const double relative = std::is_same_v<Out, float> ? 1e-6 : 1.0 / 256 * (1 + 1e-4);
      const double product =
          twice ? std::abs(want[i]) + std::abs(widen(bias[i % static_cast<size_t>(o.args.ldc) % bias.size()]))
                : 0.0;
      ASSERT_LE(std::abs(got[i] - want[i]), relative * (std::abs(want[i]) + product) + 1e-6 * size) << i;
    }
  }

  const host::Bf16Products before_ = host::bf16_products();
};

TEST_P(Bf16Gemm, IsTheProductOfWidenedOperandsRoundedOnce) {
  struct Size {
    int64_t m, n, k;
  };
  for (Size s : {Size{1, 1, 1}, Size{7, 5, 3}, Size{65, 33, 40}, Size{200, 10, 64}, Size{515, 72, 40}}) {
    for (int t = 0; t < 4; ++t) {
      check<Bf16>(Operands(s.m, s.n, s.k, (t & 1) != 0, (t & 2) != 0, 1, t), t < 2, t);
      check<float>(Operands(s.m, s.n, s.k, (t & 1) != 0, (t & 2) != 0, 1, t), t < 2, t);
    }
  }
}

TEST_P(Bf16Gemm, AccumulatesInBatches) {
  for (int t = 0; t < 4; ++t) {
    for (int64_t batch : {1, 5}) {
      Operands o(50, 56, 64, (t & 1) != 0, (t & 2) != 0, batch, 6, 8),
          large(9, 70, 80, t == 1, t == 2, batch, 2, 4);
      o.args.beta = large.args.beta = t == 3 ? 0.0f : 1.0f;
      check<Bf16>(o, false);
      check<float>(o, false);
      check<Bf16>(large, false);
      check<float>(large, false);
    }
  }
}

// Returns a product of BF16 matrices that is computed in separate calls for ranges of rows.
std::vector<float> in_bf16(const Operands& o, const std::vector<Bf16>& a, const std::vector<Bf16>& b,
                           host::Bf16Products way, int64_t rows_at_once) {
  std::vector<float> c = o.c;
  Gemm g = o.args;
  g.a = a.data(), g.b = b.data(), g.c = c.data();
  host::Bf16Panels panels;
  panels.resize(g, way);
  panels.pack(g, 0, 0, panels.count());
  for (int64_t row = 0; row < g.m; row += rows_at_once)
    host::bf16_gemm_rows(g, way, panels, 0, row, std::min(g.m, row + rows_at_once));
  return c;
}

// Returns values of any exponent, including subnormal numbers, infinities and NaNs.
std::vector<Bf16> any_bf16(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Bf16> out(count);
  for (Bf16& x : out) x.bits = static_cast<uint16_t>(random());
  return out;
}
std::vector<Bf16> moderate_bf16(size_t count, uint32_t seed) {
  return narrowed<Bf16>(testing::normal(static_cast<int64_t>(count), seed));
}

// Fixture with pairs: an implementation, and an emulation with the same bits that runs on any processor.
class Bf16Ways : public ::testing::TestWithParam<std::pair<host::Bf16Products, host::Bf16Products>> {};

TEST_P(Bf16Ways, EmulationMatchesTheInstructionBitForBit) {
  const auto [way, emulated] = GetParam();
  if (!host::has_bf16_products(way)) GTEST_SKIP() << "this processor lacks " << name_of(way);
  for (int t = 0; t < 4; ++t) {
    for (int64_t k : thinned({1, 2, 7, 32, 64, 301})) {
      const Operands o(45, 70, k, (t & 1) != 0, (t & 2) != 0, 1, t);
      for (const auto& values : {any_bf16, moderate_bf16}) {
        const auto a = values(o.a.size(), 5), b = values(o.b.size(), 6);
        const auto want = in_bf16(o, a, b, way, o.args.m);
        const auto got = in_bf16(o, a, b, emulated, o.args.m);
        for (size_t i = 0; i < want.size(); ++i) {
          if (std::isnan(want[i])) {
            ASSERT_TRUE(std::isnan(got[i])) << o.name() << " at " << i;
          } else {
            ASSERT_EQ(float_bits(got[i]), float_bits(want[i])) << o.name() << " at " << i;
          }
        }
      }
    }
  }
}

TEST_P(Bf16Ways, CuttingRowsChangesNoBit) {
  const auto emulated = GetParam().second;
  for (int t = 0; t < 4; ++t) {
    const Operands o(61, 45, 83, (t & 1) != 0, (t & 2) != 0, 1, t);
    const auto a = moderate_bf16(o.a.size(), 5), b = moderate_bf16(o.b.size(), 6);
    const auto whole = in_bf16(o, a, b, emulated, o.args.m);
    for (int64_t rows : thinned({1, 5, 14, 28, 32, 60})) {
      expect_same_bits(in_bf16(o, a, b, emulated, rows), whole, o.name());
    }
  }
}

// Compares aligned and misaligned rows. AMX reads rows of A in place if they start at cache lines and contain
// whole blocks. Otherwise AMX packs the rows.
TEST_P(Bf16Ways, RowAlignmentChangesNoBit) {
  auto [way, emulated] = GetParam();
  if (!host::has_bf16_products(way)) way = emulated;
  constexpr int64_t kRows = 77, kColumns = 40, kDistance = 160;
  for (const int64_t k : {32, 64, 160}) {
    const auto b = moderate_bf16(static_cast<size_t>(k * kColumns), 6);
    const auto values = moderate_bf16(kRows * kDistance, 5);
    std::vector<std::vector<float>> results;
    for (const int64_t offset : {0, 1}) {
      for (const int64_t distance : {kDistance, kDistance + 2}) {
        host::AlignedMemory<Bf16> memory;
        Bf16* const a = memory.reserve(kRows * distance + 1) + offset;
        for (int64_t row = 0; row < kRows; ++row)
          std::copy_n(&values[row * kDistance], k, a + row * distance);
        std::vector<float> c(kRows * kColumns);
        Gemm g{.m = kRows, .n = kColumns, .k = k};
        g.a = a, g.b = b.data(), g.c = c.data();
        g.lda = distance, g.ldb = g.ldc = kColumns;
        for (const auto how : {way, emulated}) {
          host::Bf16Panels panels;
          panels.resize(g, how);
          panels.pack(g, 0, 0, panels.count());
          host::bf16_gemm_rows(g, how, panels, 0, 0, kRows);
          results.push_back(c);
        }
      }
    }
    for (const auto& result : results) expect_same_bits(result, results.front(), fmt::format("k = {}", k));
  }
}

INSTANTIATE_TEST_SUITE_P(
    , Bf16Ways,
    ::testing::Values(std::pair(host::Bf16Products::avx512, host::Bf16Products::avx512_emulated),
                      std::pair(host::Bf16Products::amx, host::Bf16Products::amx_emulated)),
    [](const auto& info) { return info.param.first == host::Bf16Products::amx ? "amx" : "avx512"; });

TEST(Bf16Pack, MatchesTheReferenceForEveryLayoutAndRemainder) {
  const auto values = any_bf16(80 * 80, 7);
  for (bool are_rows : {false, true}) {
    for (auto [in_blocks, width] : {std::pair(false, 14), {false, 32}, {true, 32}}) {
      for (int64_t k : {1, 2, 31, 32, 33, 70}) {
        for (int64_t count : {1, 13, 16, 17, width}) {
          if (count > width) continue;
          SCOPED_TRACE(
              fmt::format("rows {} blocks {} width {} k {} count {}", are_rows, in_blocks, width, k, count));
          const int64_t pairs = in_blocks ? (k + 31) / 32 * 16 : (k + 1) / 2;
          std::vector<uint32_t> want(pairs * width + 16, 0xabababab), got = want;
          const host::Bf16Lines lines{are_rows, values.data() + 3, 79, k, count};
          reference::pack_bf16(lines, {in_blocks, width, pairs, want.data()});
          host::pack_bf16(lines, {in_blocks, width, pairs, got.data()});
          EXPECT_EQ(got, want);
        }
      }
    }
  }
}

TEST_P(Bf16Gemm, AddsABiasWhenKIsZero) {
  for (float beta : {0.0f, 2.0f}) {
    for (bool transposed : {false, true}) {
      Operands o(5, 6, 0, transposed, !transposed, 1, 3);
      o.args.beta = beta;
      check<Bf16>(o, true);
      check<float>(o, true);
    }
  }
}
#ifdef GRADWIRE_SIMT_TESTS
TEST_P(Bf16Gemm, AccumulatesOntoTheBiasWhereTheLibraryCannotAddIt) {
  simt::refuse_biases(true);
  check<Bf16>(Operands(9, 11, 13, false, true), true);
  check<float>(Operands(9, 11, 14, false, true), true);
  simt::refuse_biases(false);
}
#endif

GW_INSTANTIATE_BACKENDS(Bf16Gemm);

}  // namespace
}  // namespace gradwire::testing
