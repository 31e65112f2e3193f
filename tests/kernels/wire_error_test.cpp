// The errors of every wire format that rounds: bounds, bias, and the errors stated in the format table.
#include <cmath>

#include "kernels/wire/eden.h"
#include "tests/kernels/wire_suite.h"

namespace gradwire::testing {
namespace {

// The lookup of eden's levels on CUDA, against the comparisons with all boundaries.
template <int kBits>
void expect_same_levels() {
  constexpr LevelBins<kBits> kBins;
  for (uint32_t bits = 0; bits <= 0x7f800000u; bits += bits < 0x3d000000u ? 0x10000u : 0x400u) {
    const float x = bits_float(bits + (bits < 0x7f800000u ? bits % 0x3ffu : 0u)),
                most = at_most(x, 30.0f / LevelBins<kBits>::kPer);
    const uint32_t bin = float_bits(std::fma(most, LevelBins<kBits>::kPer, 8388608.0f)) % 32;
    const uint32_t code = kBins.before[bin] + (most > kBins.boundary[bin] ? 1u : 0u);
    ASSERT_EQ(code, with_lloyd_max<kBits>(CodeOfMagnitude{x})) << x;
    ASSERT_EQ(kBins.level[code], with_lloyd_max<kBits>(LevelOfMagnitude{x})) << x;
    ASSERT_EQ(kBins.level[code | 1u << (kBits - 1)], -kBins.level[code]);
  }
}
TEST(Eden, LookupsFindTheNearestLevels) {
  expect_same_levels<1>();
  expect_same_levels<2>();
  expect_same_levels<3>();
  expect_same_levels<4>();
  expect_same_levels<5>();
}

class WireFormatTestErrors : public WireSuite {};

// Checks the bound in the norm that error_bound() gives. Terngrad's bound holds for blocks in which no value
// is clipped. With a rotation, the largest magnitude is that of the rotated values, which are not available
// here.
TEST_P(WireFormatTestErrors, ErrorStaysWithinItsBound) {
  if (format->spec().find("rotate=hadamard") != std::string::npos) return;
  const int64_t block = std::max<int64_t>(format->granularity, 32), n = 4 * block;
  for (Rounding mode : roundings()) {
    const double bound = format->error_bound(mode);
    ASSERT_GT(bound, 0);
    for (int shape = 0; shape < 8; ++shape) {
      std::vector<float> x = normal(n, 61 + shape);
      for (int64_t i = 0; i < n; ++i) {
        float& v = x[i];
        const bool first = i % block == 0;
        if (shape == 1) v = std::copysign(1.0f, v);  // all magnitudes are equal
        if (shape >= 2 && shape < 6)
          v = first ? 1.0f : 0.3f / static_cast<float>(1 << (2 * (shape - 2)));  // one value is large
        if (shape == 6) v = v * v * v * v * v;       // the distribution has heavy tails
        if (shape == 7) v = i % 16 == 0 ? v : 0.0f;  // most values are zero
      }
      if (format->clips && shape != 1 && shape != 0) continue;
      double norm = 0, largest = 0, error = 0, worst = 0;
      constexpr int kDraws = 20;
      for (float v : x) norm += double{v} * v, largest = std::max(largest, double{v} * v);
      for (int draw = 0; draw < kDraws; ++draw) {
        WireProblem p{.own = x, .residual = {}, .out_scale = 1, .rounding = {.mode = mode, .seed = 3}};
        p.step = static_cast<uint64_t>(draw);
        const WireResult got = run(p);
        for (size_t i = 0; i < x.size(); ++i) {
          const double e = double{got.out[i]} - x[i];
          error += e * e / kDraws, worst = std::max(worst, e * e);
        }
        if (mode == Rounding::nearest) {
          error *= kDraws;
          break;
        }
      }
      EXPECT_TRUE(error <= 1.03 * bound * norm || worst <= 1.001 * bound * largest)
          << "shape " << shape << ": " << error / norm << " of the norm, " << worst / largest
          << " of the largest value; bound " << bound;
    }
  }
}

TEST_P(WireFormatTestErrors, StochasticRoundingIsUnbiased) {
  if (format->clips) return;  // clamping is biased; rounding is tested with clip=off
  WireProblem p{.own = spread_values(2000, 31, 1.0f),
                .residual = {},
                .out_scale = 1,
                .rounding = {.mode = Rounding::stochastic, .seed = 6}};
  if (!format->stochastic) {  // the format ignores the mode
    const WireResult got = run(p);
    p.rounding.mode = Rounding::nearest;
    return expect_same_result(format, p, got, run(p));
  }
  double sum = 0, outwards = 0, squares = 0;  // sums over errors; outwards: sum of errors away from zero
  for (p.step = 0; p.step < 30; ++p.step) {
    const WireResult got = run(p);
    for (size_t i = 0; i < p.own.size(); ++i) {
      const double error = static_cast<double>(got.out[i]) - p.own[i];
      sum += error;
      outwards += std::copysign(1.0, p.own[i]) * error;
      squares += error * error;
    }
  }
  EXPECT_LE(std::abs(sum), 5 * std::sqrt(squares));
  EXPECT_LE(std::abs(outwards), 5 * std::sqrt(squares));
}

TEST_P(WireFormatTestErrors, ErrorOnNormalValuesMatchesTheTable) {
#ifdef GRADWIRE_SIMT_TESTS
  const int64_t count = 1 << 15;
#else
  const int64_t count = 1 << 20;
#endif
  const WireProblem p{
      .own = normal(count, 41), .residual = {}, .out_scale = 1, .rounding = {.mode = format->rounding}};
  const WireResult got = run(p);
  double error = 0, norm = 0;
  for (size_t i = 0; i < p.own.size(); ++i) {
    error += std::pow(static_cast<double>(got.out[i]) - p.own[i], 2);
    norm += std::pow(static_cast<double>(p.own[i]), 2);
  }
  if (format->gaussian_error > 0) {
    EXPECT_NEAR(error / norm, format->gaussian_error, 0.05 * format->gaussian_error);
  } else {  // the table has no error for these options
    EXPECT_LT(error, 2 * norm);
  }
}

GW_INSTANTIATE_ON_FORMATS(WireFormatTestErrors);

}  // namespace
}  // namespace gradwire::testing
