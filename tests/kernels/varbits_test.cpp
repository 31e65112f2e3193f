// Properties specific to varbits: bits by the size of a part, masks of parts, and any bytes. wire_test.cpp
// tests the properties of all formats.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tests/kernels/wire_problem.h"

namespace gradwire::testing {
namespace {

class VarBitsWire : public ::testing::TestWithParam<Backend>, public WireFixture {
 public:
  VarBitsWire() : WireFixture(GetParam()) {}
  double error(const std::string& spec, const std::vector<float>& values) {
    const auto sent = run(wire_format(spec), {.own = values, .residual = {}, .out_scale = 1}).out;
    double error = 0, norm = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      error += std::pow(double{sent[i]} - values[i], 2), norm += std::pow(double{values[i]}, 2);
    }
    return error / norm;
  }
};

TEST_P(VarBitsWire, HasFewerBytesThanEqualBits) {
  for (int bits = 2; bits <= 4; ++bits) {
    EXPECT_EQ(wire_format(fmt::format("varbits:bits={}", bits))->bytes(4096), 512 * bits + 25);
    EXPECT_EQ(wire_format(fmt::format("eden:bits={}", bits))->bytes(4096), 512 * bits + 32);
  }
}

TEST_P(VarBitsWire, NonFiniteValuesDelayOnlyTheirPart) {
  for (int bits = 1; bits <= 4; ++bits) {
    const Wire format = wire_format(fmt::format("varbits:bits={}", bits));
    std::vector<float> values = normal(4096, 7);
    values[100] = kNan, values[101] = -kInf, values[4095] = kInf;
    const auto sent = run(format, {.own = values, .residual = {}, .out_scale = 1}).out;
    for (int i = 0; i < 4096; ++i) {
      const bool delayed = i / 64 == 1 || i / 64 == 63;
      if (!is_finite(values[i])) {
        EXPECT_TRUE(std::isnan(sent[i])) << i;
      } else {
        EXPECT_TRUE(delayed ? sent[i] == 0 : is_finite(sent[i])) << i;
      }
    }
    EXPECT_LT(std::ranges::count(sent, 0.0f), 2 * 64 + 1000);
    std::fill(values.begin(), values.begin() + 4000, kNan);
    const auto bad = run(format, {.own = values, .residual = {}, .out_scale = 1}).out;
    for (int i = 0; i < 4096; ++i) EXPECT_EQ(std::isnan(bad[i]), !is_finite(values[i])) << i;
  }
}

TEST_P(VarBitsWire, HalvesTheErrorWherePartsDifferInSize) {
  std::vector<float> values = normal(4 * 4096, 3);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] *= std::exp2(-static_cast<float>(i / 64 * 37 % 64) / 8);
  }
  for (int bits = 1; bits <= 3; ++bits) {
    EXPECT_LT(error(fmt::format("varbits:bits={}", bits), values),
              0.5 * error(fmt::format("eden:bits={}", bits), values))
        << bits << " bits";
  }
}

TEST_P(VarBitsWire, APartThatFillsABlockAloneHasFiveBits) {
  std::vector<float> values(4096);
  const std::vector<float> part = normal(64, 5);
  std::copy(part.begin(), part.end(), values.begin() + 640);
  for (int bits = 1; bits <= 4; ++bits) {
    EXPECT_NEAR(error(fmt::format("varbits:bits={}", bits), values), 0.0025, 0.0015) << bits << " bits";
  }
}

TEST_P(VarBitsWire, DecodesAnyBytes) {
  for (int bits = 1; bits <= 4; ++bits) {
    const Wire format = wire_format(fmt::format("varbits:bits={}", bits));
    for (uint32_t seed = 0; seed < 10; ++seed) {
      Bytes wire(static_cast<size_t>(format->bytes(5000)));
      std::mt19937 generator(seed);
      for (uint8_t& byte : wire) byte = seed < 2 ? 0xfe + seed : static_cast<uint8_t>(generator());
      EXPECT_EQ(decoded(format, wire, 5000).size(), 5000u);
    }
  }
}

GW_INSTANTIATE_BACKENDS(VarBitsWire);

}  // namespace
}  // namespace gradwire::testing
