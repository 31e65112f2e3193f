#include "kernels/wire/floats.h"

#include <cmath>
#include <random>

#include "kernels/math/small_float.h"
#include "tests/kernels/backend.h"

namespace gradwire::testing {
namespace {

class Fp16 : public OpTest {};

// Returns the value of an IEEE 754 half, which has a sign, 5 bits of exponent and 10 bits of fraction.
double value_of(int half) {
  const double sign = half & 0x8000 ? -1.0 : 1.0;
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  if (exponent == 31) return fraction == 0 ? sign * INFINITY : NAN;
  return sign * (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25));
}

TEST_P(Fp16, EveryHalfSurvivesARoundTrip) {
  std::vector<uint16_t> all;
  for (int half = 0; half < 0x10000; ++half) all.push_back(static_cast<uint16_t>(half));
  auto halves = array<uint16_t>(all), back = array<uint16_t>(0x10000);
  auto floats = array<float>(0x10000);
  GW_RUN(fp16_widen, (Fp16Widen{halves.data(), floats.data(), 0x10000}));
  GW_RUN(fp16_narrow, (Fp16Narrow{floats.data(), back.data(), 0x10000}));
  const auto values = floats.host();
  const auto came_back = back.host();
  for (int half = 0; half < 0x10000; ++half) {
    const double expected = value_of(half);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(values[half])) << half;
      EXPECT_EQ(came_back[half] & 0x7e00, 0x7e00) << half;
    } else {
      EXPECT_EQ(values[half], static_cast<float>(expected)) << half;
      EXPECT_EQ(std::signbit(values[half]), std::signbit(expected)) << half;
      EXPECT_EQ(came_back[half], half);
    }
  }
}

// Tests the midpoint between neighbouring halves, and the adjacent floats on both sides of the midpoint.
TEST_P(Fp16, RoundsToNearestEven) {
  std::vector<float> values;
  std::vector<uint16_t> expected;
  for (int half = 0; half < 0x7c00; half += GetParam().simt ? 7 : 1) {
    // The neighbour above the largest finite half would be 65536.
    const double above = half == 0x7bff ? 65536.0 : value_of(half + 1);
    const auto middle = static_cast<float>((value_of(half) + above) / 2);
    const int even = half % 2 == 0 ? half : half + 1;
    const int rounded[] = {half, even, half + 1};
    const float near[] = {std::nextafterf(middle, 0.0f), middle, std::nextafterf(middle, INFINITY)};
    for (int i = 0; i < 3; ++i) {
      for (int sign : {0, 0x8000}) {
        values.push_back(sign != 0 ? -near[i] : near[i]);
        expected.push_back(static_cast<uint16_t>(rounded[i] | sign));
      }
    }
  }
  for (float x : {1e5f, 3e38f, INFINITY}) values.push_back(x), expected.push_back(0x7c00);
  for (float x : {1e-30f, 1e-45f, 0.0f}) values.push_back(-x), expected.push_back(0x8000);
  auto in = array<float>(values);
  auto out = array<uint16_t>(in.size());
  GW_RUN(fp16_narrow, (Fp16Narrow{in.data(), out.data(), in.size()}));
  const auto got = out.host();
  for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(got[i], expected[i]) << values[i];
}

TEST_P(Fp16, ConvertsArraysOfAnySizeAndAlignment) {
  for (int64_t count : awkward_sizes()) {
    for (auto [floats_at, halves_at] : {std::pair{0, 0}, {1, 1}, {3, 2}}) {
      auto values = array<float>(normal(count, 3, 100.0f), floats_at), wide = array<float>(count, floats_at);
      auto halves = array<uint16_t>(count, halves_at);
      GW_RUN(fp16_narrow, (Fp16Narrow{values.data(), halves.data(), count}));
      GW_RUN(fp16_widen, (Fp16Widen{halves.data(), wide.data(), count}));
      halves.expect_guards_intact("halves");
      wide.expect_guards_intact("floats");
      const auto given = values.host(), got = wide.host();
      for (int64_t i = 0; i < count; ++i) ASSERT_EQ(got[i], fp16_to_float(float_to_fp16(given[i])));
    }
  }
}

GW_INSTANTIATE_BACKENDS(Fp16);

}  // namespace
}  // namespace gradwire::testing
